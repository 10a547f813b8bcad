"""Pictures as SVG text: rectangles and words, nothing else. They read on light and dark pages alike."""

import dataclasses
from collections.abc import Iterable
from xml.sax.saxutils import escape

# Told apart by most eyes that see few colours, dark text on them readable; ranks beyond these start again.
COLOURS = ("#8dc3ea", "#f6c177", "#a3d9a5", "#e6a0b8", "#cbb5ec", "#f0e08a", "#9adbd3", "#d7b899")
PAPER, INK, FAINT = "#ffffff", "#1b1f24", "#d0d7de"


def colour(rank: int) -> str:
    """The fill of a rank's cells."""
    return COLOURS[rank % len(COLOURS)]


@dataclasses.dataclass
class Picture:
    """What was drawn so far, in pixels from the top left corner. `title` is what a screen reader says."""

    title: str
    width: float = 0.0
    height: float = 0.0
    parts: list[str] = dataclasses.field(default_factory=list)

    def words(self, x: float, y: float, text: str, *, size: int = 12, bold: bool = False, middle: bool = False) -> None:
        """One line of text; `y` is its base line, `x` its left end or its middle."""
        weight, anchor = ' font-weight="600"' if bold else "", ' text-anchor="middle"' if middle else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}"{weight}{anchor}>{escape(text)}</text>')
        self._reach(x + 0.62 * size * len(text) * (0.5 if middle else 1), y + size / 2)

    def cell(self, x: float, y: float, width: float, height: float, text: str = "", fill: str = PAPER) -> None:
        """A box with a word in its middle."""
        box = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect {box} fill="{fill}" stroke="{INK}" stroke-width="0.6"/>')
        if text:
            self.words(x + width / 2, y + height / 2 + 4, text, size=11, middle=True)
        self._reach(x + width, y + height)

    def cells(self, x: float, y: float, size: float, items: Iterable[tuple[str, str]]) -> None:
        """Square cells side by side: word and fill each."""
        for i, (text, fill) in enumerate(items):
            self.cell(x + i * size, y, size, size, text, fill)

    def _reach(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)

    def render(self, margin: float = 12) -> str:
        """The SVG document, one element a line."""
        width, height = round(self.width + margin), round(self.height + margin)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'role="img" font-family="system-ui, sans-serif" fill="{INK}">'
        )
        paper = f'<rect width="{width}" height="{height}" fill="{PAPER}"/>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", paper, *self.parts, "</svg>"]) + "\n"
