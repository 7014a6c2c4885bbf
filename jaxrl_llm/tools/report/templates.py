"""Reads the templates of pages from `assets/report/`. It needs no extra, so pages without curves need no plotly."""

from __future__ import annotations

from pathlib import Path

import jinja2

import jaxrl_llm

ASSETS = Path(jaxrl_llm.__file__).parent / "assets" / "report"


def template(name: str) -> jinja2.Template:
    """Returns a template of `assets/report/`."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        # Text is escaped, because prompts and completions may hold HTML.
        autoescape=True,
        # StrictUndefined makes a wrong name in a template an error, and not an empty place on the page.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(name)


def script_json(text: str) -> str:
    """Escapes JSON for a <script> element."""
    # Text of a policy may hold "</script>", which would end the element.
    return text.replace("<", "\\u003c")
