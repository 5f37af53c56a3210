"""Write the table of findings in doctor.md from the code."""

import re
from pathlib import Path

from fedbn_flwr.doctor.findings import KINDS

PAGE = Path(__file__).with_name("doctor.md")
MARKS = ("<!-- findings: begin -->\n", "<!-- findings: end -->")


def table() -> str:
    """Return a row for each kind of finding, worst first."""
    rows = ["| finding | what was seen | what follows, and what mends it |", "|---|---|---|"]
    for name, kind in KINDS.items():
        saw = kind.saw.replace("{layers}", "*layers*").replace("{detail}", "")
        then = f"{kind.follows} {kind.mend}".strip()
        rows.append(f'| <a id="{name}"></a>{kind.level}: `{name}` | {saw} | {then} |')
    return "\n".join(rows) + "\n"


def main() -> None:
    """Put the table between its marks."""
    begin, end = MARKS
    pattern = re.compile(re.escape(begin) + ".*" + re.escape(end), re.DOTALL)
    PAGE.write_text(pattern.sub(lambda _: begin + table() + end, PAGE.read_text()))


if __name__ == "__main__":
    main()
