"""The whole page: groups under their setting, theory, style and script in one file."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

from dropkv._version import __version__
from dropkv.bench.report import accuracy, speed, theory
from dropkv.bench.report.groups import group
from dropkv.bench.report.html import text
from dropkv.bench.report.lines import read_lines, split_speed
from dropkv.bench.speed.text import runs_of
from dropkv.errors import ResultsError
from formats.temporary import replacing

SETTINGS = {
    "question-free": "The cache was compressed before any question was known, as a KV file is.",
    "question-aware": "The question's last tokens chose what is kept, as in the paper. Not comparable with question-free figures.",
}


def write_report(lines: Iterable[Mapping[str, Any]], path: str | os.PathLike[str]) -> None:
    """Write result lines (accuracy, theory and speed) as one HTML file that loads nothing; an older one is replaced in one step.

    Raises ResultsError for lines that are no results of this version, FormatError when the file cannot be written.
    """
    page = render_report(lines).encode("utf-8")
    with replacing(path, overwrite=True) as descriptor, open(descriptor, "wb", closefd=False) as file:
        file.write(page)


def render_report(lines: Iterable[Mapping[str, Any]]) -> str:
    """The page as text. Raises ResultsError."""
    speed_lines, others = split_speed(lines)
    results, theory_lines = read_lines(others)
    if not results and not theory_lines and not speed_lines:
        raise ResultsError(
            "no result lines, so there is nothing to report: run dropkv bench accuracy, theory or speed first"
        )
    contents: list[str] = []
    body: list[str] = []
    groups = group(results)
    for setting, note in SETTINGS.items():
        chosen = [made for made in groups if made.setting == setting]
        if not chosen:
            continue
        contents.append(f'<li><a href="#{setting}">{setting.capitalize()}</a><ul>')
        body.append(f'<h2 id="{setting}">{setting.capitalize()}</h2><p>{note}</p>')
        for number, made in enumerate(chosen):
            anchor = f"{setting}-{number}"
            contents.append(f'<li><a href="#{anchor}">{text(accuracy.heading(made))}</a></li>')
            body.append(accuracy.section(made, anchor))
        contents.append("</ul></li>")
    if theory_lines:
        contents.append('<li><a href="#theory">Theory</a><ul>')
        body.append('<h2 id="theory">Theory</h2><p>How well the assumptions behind the score hold.</p>')
        for number, run in enumerate(theory.runs(theory_lines)):
            contents.append(f'<li><a href="#theory-{number}">{text(theory.heading(run))}</a></li>')
            body.append(theory.section(run, f"theory-{number}"))
        contents.append("</ul></li>")
    if speed_lines:
        contents.append('<li><a href="#speed">Speed</a><ul>')
        body.append('<h2 id="speed">Speed</h2><p>Seconds and memory, beside transformers with its full cache.</p>')
        for number, run in enumerate(runs_of(speed_lines)):
            contents.append(f'<li><a href="#speed-{number}">{text(run[0].get("model"))}</a></li>')
            body.append(speed.section(run, f"speed-{number}"))
        contents.append("</ul></li>")
    return _page("".join(contents), "".join(body), len(results))


def _page(contents: str, body: str, questions: int) -> str:
    style, script = _own("page.css"), _own("page.js")
    # Nothing may be loaded, and no script or style but these two may run, whatever a prediction says.
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>dropkv bench</title><style>{style}</style></head><body>"
        f"<header><h1>dropkv bench</h1><p>{questions:,} answered questions, dropkv {text(__version__)}. "
        "Click a heading of a table to sort by it.</p></header>"
        f'<nav aria-label="contents"><ul>{contents}</ul></nav><main>{body}</main><script>{script}</script></body></html>\n'
    )


def _own(name: str) -> str:
    return files("dropkv.bench.report").joinpath(name).read_text(encoding="utf-8")


def _digest(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode("utf-8")).digest()).decode("ascii")
