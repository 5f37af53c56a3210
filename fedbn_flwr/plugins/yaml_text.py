"""YAML whose keys stand once: PyYAML takes the last of several, and says nothing."""

from typing import Any

import yaml


def load_yaml(text: str) -> Any:
    """Return the content of a text; a ValueError says in one line where it is not YAML."""
    try:
        return yaml.load(text, _UniqueKeys)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


class _UniqueKeys(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.YAMLError(
                    f"line {key.start_mark.line + 1} has the key {key.value!r} a second time"
                )
            seen.add(key.value)
        return node
