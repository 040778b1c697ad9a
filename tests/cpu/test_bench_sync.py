"""`megarl bench sync` on a tiny model: every way runs, leaves the right weights (which it checks
itself), and is reported.
"""

from __future__ import annotations

import json

import pytest

from megarl.cli import main
from megarl.weight_sync.transports import mooncake


@pytest.mark.long
def test_all_ways_are_reported_with_their_ceilings(capfd):
    transports = [
        "--transport",
        "shared_memory",
        "--transport",
        "gloo",
        *(["--transport", "mooncake"] if mooncake.imports() else []),
    ]
    assert (
        main(["bench", "sync", "--json", "--model-size", "tiny", "--repeats", "1", *transports])
        == 0
    )
    out, err = capfd.readouterr()
    assert err == "", "what libraries tell on the way stays out of the terminal"
    facts = json.loads(out.splitlines()[-1])
    ways = {way["name"]: way for way in facts["ways"]}
    assert {
        "direct shared_memory",
        "direct gloo",
        "gather + broadcast",
        "gather + bucket",
        "ceiling memcpy",
    } <= ways.keys()
    for name in ("direct shared_memory", "direct gloo"):
        assert (
            ways[name]["bytes_moved"] == facts["bytes"]
            and ways[name]["of_ceiling"] > 0
            and ways[name]["times_faster"] > 0
        )
    norms = 5 * 256 * 4  # both trainer ranks have these: none are sent to rank 0
    # Half of the other bytes go to rank 0, and all of them to the engine.
    assert (
        ways["gather + broadcast"]["bytes_moved"] == facts["bytes"] + (facts["bytes"] - norms) // 2
    )
