"""The guide's diagrams, drawn as SVG: `python docs/diagrams.py` writes them to docs/images.

Plain shapes and words, without a font or a script from elsewhere; a test holds the files to what this draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
INK, PAPER, LINE = "#20262d", "#fffdf8", "#c9963a"
BLUE, GREEN, ORANGE, GREY = "#e6eef4", "#e6f0e6", "#f9e4d6", "#f6eedc"


@dataclass
class Drawing:
    """A picture of boxes, arrows and words; the newest stands on top."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: int, y: int, width: int, height: int, lines: Sequence[str], fill: str = GREY) -> None:
        """Draw a box with centred lines; the first is bold."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{LINE}"/>'
        )
        top = y + height / 2 - 9 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            self.words(x + width / 2, top + 18 * number, line, bold=number == 0)

    def words(self, x: float, y: float, text: str, *, bold: bool = False, anchor: str = "middle") -> None:
        """Write one line, centred on x unless told otherwise."""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{escape(text)}</text>')

    def arrow(self, x: int, y: int, to_x: int, to_y: int, *, both: bool = False) -> None:
        """Draw an arrow from one point to another, or in both directions."""
        start = ' marker-start="url(#tip)"' if both else ""
        self.parts.append(
            f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{INK}" stroke-width="1.5" '
            f'marker-end="url(#tip)"{start}/>'
        )

    def svg(self) -> str:
        """Return the whole picture."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
                f'font-family="system-ui, sans-serif" font-size="14" fill="{INK}">',
                f"<title>{escape(self.title)}</title>",
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
                f'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
                f'<rect width="{self.width}" height="{self.height}" rx="10" fill="{PAPER}"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def one_round() -> Drawing:
    """A round of federated learning: hospitals train, the server computes weights and adds the updates."""
    drawing = Drawing(760, 330, "One round of federated learning")
    drawing.box(270, 20, 220, 62, ["server", "has the current model"], BLUE)
    hospitals = [("Cleveland", "303 patients"), ("Budapest", "294 patients"), ("Basel", "123 patients")]
    for number, (name, rows) in enumerate(hospitals):
        x = 40 + 250 * number
        drawing.box(x, 130, 180, 62, [name, rows + ", stay here"], GREEN)
        drawing.arrow(380, 84, x + 90, 128, both=True)
    drawing.words(150, 100, "1  the model goes out")
    drawing.words(610, 100, "2  updates come back")
    drawing.box(40, 240, 200, 66, ["3  measure", "size, labels, accuracy"], GREY)
    drawing.box(280, 240, 200, 66, ["4  compute weights", "by the rule that you choose"], ORANGE)
    drawing.box(520, 240, 200, 66, ["5  add the updates", "the new model"], BLUE)
    drawing.arrow(242, 273, 278, 273)
    drawing.arrow(482, 273, 518, 273)
    return drawing


def machines() -> Drawing:
    """A federation across machines: who runs what, and what travels."""
    drawing = Drawing(760, 300, "A federation across machines")
    drawing.box(290, 20, 180, 100, ["operator", "federate serve", "no data needed"], BLUE)
    drawing.words(380, 145, "one port, TLS, registered keys only")
    for number, name in enumerate(("hospital-a", "hospital-b", "hospital-c")):
        x = 40 + 250 * number
        drawing.box(x, 190, 180, 90, [name, "federate node", "its data, its own file"], GREEN)
        drawing.arrow(380, 155, x + 90, 188, both=True)
    drawing.words(120, 160, "models and criteria")
    drawing.words(640, 160, "never samples")
    return drawing


def which_rule() -> Drawing:
    """Five questions that lead to a rule to begin with."""
    drawing = Drawing(760, 420, "Which rule to begin with")
    questions = [
        ("May clients be malicious?", "clip(capped(RD;max_shares=1.5))", "bounded, not unbreakable"),
        ("Server: hundreds of trusted samples?", "server-only first", "you may need no clients"),
        ("Server: a few trusted samples?", "VP>LD>DS/max", "better in 29 of 45 cases"),
        ("May the large clients be faulty?", "LE or EQ", "better in 27 and 24"),
        ("Do clients differ at all?", "LD>DS>MD/max", "better in 29 of 45 cases"),
    ]
    for number, (question, rule, why) in enumerate(questions):
        y = 16 + 70 * number
        drawing.box(30, y, 340, 46, [question], BLUE)
        drawing.arrow(372, y + 23, 438, y + 23)
        drawing.words(405, y + 17, "yes")
        drawing.box(440, y, 310, 46, [rule, why], ORANGE)
        drawing.arrow(200, y + 48, 200, y + 68)
        drawing.words(222, y + 63, "no")
    drawing.box(30, 366, 340, 40, ["fedavg: nothing to gain"], GREY)
    return drawing


def promises() -> Drawing:
    """What each protection leaves to be seen, by whom."""
    drawing = Drawing(760, 270, "Who sees what under each protection")
    seen = {"seen": ORANGE, "hidden": GREEN, "noisy": GREEN}
    for number, name in enumerate(("single updates", "their sum", "the models")):
        drawing.words(320 + 170 * number, 34, name, bold=True)
    rows = [
        ("no protection", "seen by the server", "seen by the server", "seen by all"),
        ("secure aggregation", "hidden", "seen by the server", "seen by all"),
        ("central noise", "seen by the server", "noisy for all others", "noisy for all"),
        ("local noise", "noisy for all", "noisy for all", "noisy for all"),
    ]
    for row, (name, *cells) in enumerate(rows):
        y = 54 + 52 * row
        drawing.words(20, y + 26, name, bold=True, anchor="start")
        for column, cell in enumerate(cells):
            drawing.parts.append(
                f'<rect x="{240 + 170 * column}" y="{y}" width="160" height="42" rx="6" fill="{seen[cell.split()[0]]}" '
                f'stroke="{LINE}"/>'
            )
            drawing.words(320 + 170 * column, y + 26, cell)
    return drawing


DIAGRAMS: dict[str, Callable[[], Drawing]] = {
    "round": one_round,
    "machines": machines,
    "which-rule": which_rule,
    "promises": promises,
}


def main() -> None:
    """Write every diagram to its file."""
    for name, draw in DIAGRAMS.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
