"""A page of plots as one HTML file that needs no network."""

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import RunError
from shared.files import write_bytes, writing

if TYPE_CHECKING:
    import plotly.graph_objects as go

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px;
       padding: 0 1em; color: #222; }}
h1 {{ font-size: 1.4em; }}
table {{ border-collapse: collapse; width: 100%; margin: 1em 0; }}
th, td {{ text-align: left; vertical-align: top; padding: .4em .7em;
          border-bottom: 1px solid #ddd; }}
.severity {{ color: white; border-radius: 3px; padding: .1em .5em; white-space: nowrap; }}
.advice {{ color: #555; }}
.small {{ color: #555; font-size: .9em; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def write_page(path: Path, title: str, body: str) -> None:
    """Write a page to `path`, whole or not at all.

    Args:
        title: plain text.
        body: HTML, escaped where it must be.

    Raises:
        DraftCacheError: the path cannot be written.
    """
    with writing(path):
        write_bytes(path, _PAGE.format(title=escape(title), body=body).encode())


def table_html(rows: list[list[str]]) -> str:
    """A table of plain text; the first row is its head."""
    cells = [[escape(cell) for cell in row] for row in rows]
    body = "".join(f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in cells[1:])
    return f"<table><tr><th>{'</th><th>'.join(cells[0])}</th></tr>{body}</table>"


def plot_html(figure: "go.Figure", *, with_script: bool = True) -> str:
    """A figure as part of a page; the first one of a page carries plotly's script."""
    text: str = figure.to_html(
        full_html=False, include_plotlyjs=with_script, config={"displaylogo": False}
    )
    return text


def import_plotly() -> tuple[Any, Any]:
    """plotly's `graph_objects` and `make_subplots`.

    Raises:
        RunError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
        from plotly.subplots import make_subplots
    except ModuleNotFoundError:
        raise RunError(
            "the page is drawn by plotly, which is not installed. Install it: "
            "pip install 'draftcache[report]'."
        ) from None
    return go, make_subplots
