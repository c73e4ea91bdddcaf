"""HTML pages from the package's templates, with every value escaped.

A page is one self-contained file. Its content security policy allows only the inline style and script of the package,
identified by their hashes.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

_TEMPLATES = files("onefold.report") / "templates"


def _source(name: str) -> str:
    return _TEMPLATES.joinpath(name).read_text("utf-8")


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FunctionLoader(_source),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)


def render_page(template: str, styles: Sequence[str] = (), scripts: Sequence[str] = (), **values: Any) -> str:
    """Return a page.

    Args:
        template: File name of the template.
        styles: File names of style sheets; the template inserts them with `style` and `style_hash`.
        scripts: File names of scripts; the template inserts them with `script` and `script_hash`.
        **values: Values for the template, escaped unless they are `Markup`.

    Raises:
        jinja2.UndefinedError: The template uses a value that is not passed.
    """
    style, script = ("".join(map(_source, names)) for names in (styles, scripts))
    return _ENVIRONMENT.get_template(template).render(
        style=Markup(style),
        script=Markup(script),
        style_hash=_content_hash(style),
        script_hash=_content_hash(script),
        **values,
    )


def _content_hash(text: str) -> str:
    """Return the hash that identifies an inline script or style in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
