"""`RESULTS.md` has sections that scripts write and text that people write: each keeps its hands off the other's."""

import re
import sys
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")


class Section:
    """What one script has measured. Lines are shown as they come, and put into the file by `write`.

    In the file a section stands between `<!-- NAME -->` and `<!-- end of NAME -->`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lines: list[str] = []

    def add(self, *lines: str) -> None:
        """More lines of Markdown."""
        self._lines += lines
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()

    def write(self, path: Path = RESULTS) -> None:
        """Replace what the section had. Raises `ValueError` if the file has no such section."""
        begin, end = f"<!-- {self.name} -->\n", f"<!-- end of {self.name} -->"
        text = path.read_text()
        pattern = re.compile(re.escape(begin) + r".*?" + re.escape(end), re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{path} has no section {self.name!r}")
        content = begin + "\n".join(self._lines).strip("\n") + "\n" + end
        path.write_text(pattern.sub(lambda _: content, text))
