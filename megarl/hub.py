"""The Hugging Face hub: files by their repository's name, out of its cache or over the network.

Its own client tries five times, for half a minute, for every file; and so does each process. Here it is asked once whether the hub can be
reached; where it cannot, this process and all that it starts look in the cache alone.
"""

from __future__ import annotations

import functools
import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path

OFFLINE = "HF_HUB_OFFLINE"  # environment: the hub's own switch
ANSWER_S = 5.0


class HubError(Exception):
    """Why there is no such file. Completes the sentence "model.path=owner/name: …"."""


def hub_file(repository: str, name: str, kind: str = "model") -> Path:
    """A file of owner/name, a "model" or a "dataset", as it lies in the cache. Raises HubError."""
    use_cache = unreachable()
    from huggingface_hub import hf_hub_download  # only now: it looks at OFFLINE when it is imported
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(hf_hub_download(repository, name, repo_type=kind, local_files_only=bool(use_cache)))
    except LocalEntryNotFoundError as error:
        raise HubError(f"{name} is not in the hub's cache, and {use_cache or _first_line(error)}") from error
    except EntryNotFoundError as error:
        raise HubError(f"has no {name} on the hub") from error
    except GatedRepoError as error:
        raise HubError("is gated on the hub: accept its terms there, and log in by `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise HubError("is no local folder, and no repository on the hub; a private one needs `hf auth login`") from error
    except (OSError, ValueError) as error:  # all of the hub's errors derive from these
        raise HubError(f"cannot be read from the hub: {_first_line(error)}") from error


@functools.cache
def unreachable() -> str:
    """Why the hub is not to be asked; empty where it can be. Settles it for whatever this process starts, too."""
    if os.environ.get(OFFLINE, "").lower() in ("1", "true", "yes", "on"):
        return f"{OFFLINE} is set"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=ANSWER_S).close()
    except urllib.error.HTTPError:
        return ""  # it has answered
    except (OSError, http.client.HTTPException, ValueError) as error:
        os.environ[OFFLINE] = "1"
        return f"{endpoint} cannot be reached ({getattr(error, 'reason', error)})"
    return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
