"""The report page: one HTML file with everything in it. What a run wrote is in it compressed, and becomes text nodes only.

The page's policy lets no script run but its own, and nothing be loaded; a page that is served may ask its server.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = (
    "uPlot.iife.min.js",
    *(f"{name}.js" for name in ("store", "charts", "timeline", "times", "weights", "samples", "sample", "summary", "main")),
)
STYLES = ("uPlot.min.css", "page.css")

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">to the content</a>
<header><div class="bar">
<h1>{heading}</h1><span class="live" id="live">{made}</span><nav role="tablist" aria-label="questions"></nav>
</div></header>
<main id="main"><div id="top"><p class="soft">reading …</p></div><div id="tools"></div></main>
<footer>Made by megarl report from {sources}. Curves by uPlot (MIT).</footer>
<noscript><p>This page needs JavaScript; the same is in the run's metrics.jsonl, trace.json and rollouts/.</p></noscript>
<script type="application/json" id="live-data">{live}</script>
{runs}
<script>{script}</script>
{chunks}
</body>
</html>
"""


def page(found: Sequence[Mapping[str, Any]], made: str, live: Mapping[str, Any] | None = None) -> str:
    """`found`: what RunReader.read returns of each run. `made`: when. `live`: how a served page asks for what is new."""
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "</script" not in script
    connect = "'self'" if live else "'none'"
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; connect-src {connect}"
    names = [each["name"] for each in found]
    return PAGE.format(
        policy=policy,
        title=html.escape(f"{', '.join(names[:3])}{' …' if len(names) > 3 else ''} · MegaRL"),
        heading=html.escape(names[0] if len(names) == 1 else f"{len(names)} runs"),
        made=html.escape(made),
        sources=html.escape(", ".join(str(each["path"]) for each in found)),
        style="\n".join((ASSETS / name).read_text(encoding="utf-8") for name in STYLES),
        live=json.dumps(live).replace("<", "\\u003c"),
        runs="\n".join(f'<script type="text/plain" class="run">{packed(_without_chunks(each))}</script>' for each in found),
        script=script,
        chunks="\n".join(
            f'<script type="text/plain" id="chunk-{run}-{number}">{chunk}</script>'
            for run, each in enumerate(found)
            for number, chunk in enumerate(each["samples"]["chunks"])
        ),
    )


def packed(value: Any) -> str:
    return base64.b64encode(gzip.compress(json.dumps(value, allow_nan=False, separators=(",", ":")).encode(), 6, mtime=0)).decode()


def _without_chunks(found: Mapping[str, Any]) -> dict[str, Any]:
    """The page has them beside, as many elements: one is opened when it is looked at."""
    return {**found, "samples": {**found["samples"], "chunks": [0] * len(found["samples"]["chunks"])}}
