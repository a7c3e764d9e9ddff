"""Pictures of the tutorials for the landing page: `python -m docs.cards`.

Each is an SVG of 320 x 180 on a light ground of its own, so that it can be read in the
light and the dark scheme. Numbers are medians that the tutorials print.
"""

import statistics
from pathlib import Path

FOLDER = Path(__file__).parent / "_static" / "cards"
INK, BLUE, GRAY, ORANGE = "#1f2933", "#1f77b4", "#b4bcc6", "#e8710a"
LEFT, RIGHT, TOP, BOTTOM = 48, 300, 40, 144  # of the plot
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 320 180"
  width="320" height="180" role="img">
<style>text {{ font: 15px system-ui, sans-serif; fill: {ink}; }}</style>
<title>{title}</title>
<rect width="320" height="180" rx="6" fill="#f4f6f8"/>
"""


def text(x, y, words, *, anchor="start", turn=False):
    """Return words, turned by a quarter if `turn`."""
    place = f'x="{x:g}" y="{y:g}"'
    if turn:
        place += f' transform="rotate(-90 {x:g} {y:g})"'
    return f'<text {place} text-anchor="{anchor}">{words}</text>'


def line(points, color, *, dashed=False, width=3):
    """Return a line through points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    look = f'fill="none" stroke="{color}" stroke-width="{width}"{dash}'
    return f'<polyline points="{path}" {look}/>'


def bar(x, value, color, *, width):
    """Return a bar that stands on the axis; a value of 0 is an outline."""
    height = (BOTTOM - TOP) * value
    look = f'fill="{color}"'
    if not value:
        height, look = 34, f'fill="none" stroke="{color}" stroke-dasharray="4 3"'
    size = f'width="{width}" height="{height:.1f}"'
    return f'<rect x="{x:g}" y="{BOTTOM - height:.1f}" {size} {look}/>'


def dot(x, y, color, radius=6):
    """Return a dot."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"/>'


def axes(below, beside=""):
    """Return two axes and their names."""
    corner = [(LEFT, TOP - 12), (LEFT, BOTTOM), (RIGHT, BOTTOM)]
    parts = [line(corner, INK, width=1)]
    parts.append(text((LEFT + RIGHT) / 2, 168, below, anchor="middle"))
    if beside:
        parts.append(text(30, (TOP + BOTTOM) / 2, beside, anchor="middle", turn=True))
    return parts


def sources():
    """Draw six hospitals, of which three are kept."""
    parts = [line([(12, BOTTOM), (308, BOTTOM)], INK, width=1)]
    parts += [text(20, 48, "weight 1/3"), text(180, 48, "weight 0:")]
    parts.append(text(180, 66, "labels swapped"))
    for i, name in enumerate("ABCDEF"):
        x = 20 + 48 * i + (16 if i > 2 else 0)
        parts.append(bar(x, 0 if i > 2 else 0.8, ORANGE if i > 2 else BLUE, width=32))
        parts.append(text(x + 16, 162, name, anchor="middle"))
    return "Weights of six hospitals: three are trusted", parts


def tuning():
    """Draw settings at full budget, and the tuned model."""
    low, high = 0.6, 0.9
    parts = axes("accuracy")
    for y, values, color, name in (
        (72, (0.62, 0.62, 0.65, 0.76, 0.85, 0.86), GRAY, "six settings, each alone"),
        (122, (0.84,), BLUE, "tuned, same epsilon"),
    ):
        parts.append(text(LEFT + 10, y - 16, name))
        for value in values:
            x = LEFT + (RIGHT - LEFT) * (value - low) / (high - low)
            parts.append(dot(x, y, color))
    return "Accuracy of six settings, and of the tuned model", parts


def fine_tuning():
    """Draw the accuracy as the budget is spent."""
    parts = axes("epsilon spent", "accuracy")
    adapters = (0.70, 0.74, 0.76, 0.75, 0.72, 0.73, 0.77, 0.79, 0.80, 0.81)
    scratch = (0.37, 0.18, 0.42, 0.47, 0.54, 0.58, 0.62, 0.63, 0.60, 0.66)
    for values, color in ((scratch, GRAY), (adapters, BLUE)):
        x = [LEFT + (RIGHT - LEFT) * (i + 1) / 10.5 for i in range(10)]
        y = [BOTTOM - (BOTTOM - TOP) * (v - 0.1) / 0.8 for v in values]
        parts.append(line(zip(x, y, strict=True), color))
    parts.append(text(LEFT + 24, 38, "pretrained, adapters"))
    parts.append(text(168, 126, "from random"))
    return "Accuracy of adapters and of a network from random weights", parts


def people():
    """Draw the epsilon of a person by the number of rows."""
    parts = axes("rows of a person", "epsilon")
    promised = (1.0, 2.2, 3.4, 4.8, 6.2, 7.7, 9.3, 10.9)
    for values, color in ((promised, ORANGE), ((1.0,) * 8, BLUE)):
        x = [LEFT + 14 + 32 * i for i in range(8)]
        y = [BOTTOM - (BOTTOM - TOP) * v / 11 for v in values]
        parts.append(line(zip(x, y, strict=True), color))
    parts.append(text(LEFT + 24, 62, "each row protected"))
    parts.append(text(RIGHT, 125, "the person protected", anchor="end"))
    return "Epsilon of a person, if rows or people are protected", parts


def groups():
    """Draw the accuracy of two groups under two models."""
    parts = [line([(20, BOTTOM), (RIGHT, BOTTOM)], INK, width=1)]
    for x, values, name in ((40, (0.89, 0.57), "average"), (190, (0.75, 0.75), "fair")):
        for i, value in enumerate(values):
            place = x + 46 * i
            parts.append(bar(place, value, (GRAY, BLUE)[i], width=38))
            y = BOTTOM - (BOTTOM - TOP) * value - 6
            parts.append(text(place + 19, y, f"{value:.2f}", anchor="middle"))
        parts.append(text(x + 42, 164, name, anchor="middle"))
    parts.append(text(20, 24, "accuracy of"))
    for x, name, color in ((124, "men", GRAY), (186, "women", BLUE)):
        parts += [dot(x, 20, color), text(x + 12, 24, name)]
    return "Accuracy for men and women, by the average and by the fair model", parts


def certificate():
    """Draw the detection rates of the best attack."""
    normal, parts = statistics.NormalDist(), axes("false alarms", "detected")
    alarms = [0.001, *(i / 40 for i in range(1, 40)), 0.999]
    x = [LEFT + (RIGHT - LEFT) * a for a in alarms]
    for mu, color in ((1.67, ORANGE), (0.268, BLUE), (0.0, GRAY)):
        power = [normal.cdf(normal.inv_cdf(a) + mu) for a in alarms]
        y = [BOTTOM - (BOTTOM - TOP) * p for p in power]
        parts.append(line(zip(x, y, strict=True), color, dashed=not mu))
    parts.append(text(LEFT + 18, 36, "epsilon 8"))
    parts.append(text(150, 81, "epsilon 1", anchor="end"))
    parts.append(text(196, 116, "guessing"))
    return "Records that the best attack detects, by false alarms", parts


CARDS = sources, tuning, fine_tuning, people, groups, certificate


def drawn(card):
    """Return a picture as SVG."""
    title, parts = card()
    lines = [HEAD.format(ink=INK, title=title) + "\n".join(parts), "</svg>", ""]
    return "\n".join(lines)


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for card in CARDS:
        (FOLDER / f"{card.__name__}.svg").write_text(drawn(card))


if __name__ == "__main__":
    main()
