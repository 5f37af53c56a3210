"""The README as a package index shows it: links and pictures lead into the repository, at the tag
of the version.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class CustomMetadataHook(MetadataHookInterface):
    """Puts README.md into the metadata, with absolute links."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add `readme`, whose links are made of `urls` and `version`."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute(text, metadata["urls"]["Repository"], f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, repository: str, tag: str) -> str:
    """Return a Markdown text whose relative links lead into a repository:

    `raw` has files, `blob` shows them.
    """

    def link(found: re.Match[str]) -> str:
        mark, label, target = found.groups()
        path = f"README.md{target}" if target.startswith("#") else target
        return f"{mark}[{label}]({repository}/{'raw' if mark else 'blob'}/{tag}/{path})"

    return re.sub(r"(!?)\[([^]]*)\]\((?![a-z]+:)([^)\s]+)\)", link, text)
