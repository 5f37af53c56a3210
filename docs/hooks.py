"""Show notebooks, and README's first screen, as pages of the site: MkDocs calls these functions
(`hooks` in mkdocs.yml).
"""

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

README = Path(__file__).parents[1] / "README.md"
#: where README's first screen stands in a page
MARK = "<!-- README's first screen -->"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page, and its pictures, for each notebook.

    The notebook itself stays, to be downloaded.
    """
    for file in [file for file in files if file.src_path.endswith(".ipynb")]:
        stem = file.src_path.removesuffix(".ipynb")
        text, pictures = shown(json.loads(Path(file.abs_src_path or "").read_text()), stem)
        files.append(
            File.generated(
                config, f"{stem}.md", content=f"{text}\n\n[This notebook]({file.name}.ipynb)\n"
            )
        )
        for name, picture in pictures.items():
            files.append(File.generated(config, name, content=picture))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put README's first screen into the page that has its mark, and let links lead to the page of
    a notebook; only that page's own link leads to the file.
    """
    if "[This notebook](" in markdown:
        return markdown
    if MARK in markdown:
        markdown = markdown.replace(MARK, first_screen())
    return markdown.replace(".ipynb)", ".md)")


def first_screen() -> str:
    """Return what README has below its title and above its commands, as a page of the site."""
    below_title = README.read_text().split("\n", 1)[1]
    # README lies beside the folder of the pages
    return below_title.split("\n## Try it")[0].replace("](docs/", "](")


def shown(notebook: dict[str, Any], stem: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by name."""
    parts, pictures = list[str](), dict[str, bytes]()
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = {
                kind: "".join(text)
                for kind, text in output.get("data", {}).items()
                if kind != "metadata"
            }
            if "text/html" in data:
                parts.append(data["text/html"].strip())
            elif "image/png" in data:
                name = f"{stem}-{len(pictures)}.png"
                pictures[name] = b64decode(data["image/png"])
                parts.append(f"![Output of the cell above]({name})")
            else:
                parts.append(f"```\n{''.join(output.get('text', ''))}```")
    return "\n\n".join(parts), pictures
