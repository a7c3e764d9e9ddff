"""Write the records that the configs of this folder read, beside them.

`python configs/records.py` generates the records of all configs but census.toml.
`python configs/records.py ADULT.csv` writes those of census.toml, from the Adult data
set of the UCI repository as one CSV file with a header, for instance from openml.org.
"""

import csv
import pathlib
import sys

import numpy as np

FOLDER = pathlib.Path(__file__).parent
TRAINING, VALIDATION = 20_000, 6_000
FLIPS = np.array([0.0, 0.0, 0.0, 0.5, 0.5, 0.9, 0.9, 0.9])  # of the labels of a source
LABEL, CLASSES = "income-per-year", ("<=50K", ">50K")


def write(name, header, rows):
    """Write one file."""
    with (FOLDER / name).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    print(FOLDER / name)


def generate(count, blocks, turns=(0.0,), shares=(1.0,)):
    """Return a header, cells, labels and groups of a logistic model.

    Features are normal. `blocks` has the number of features and the length of the true
    coefficients of each block. A record is in group g with chance `shares[g]`; the
    coefficients of group g are turned by `turns[g]` degrees towards a direction of
    their own.
    """
    rng = np.random.default_rng(0)
    header = [f"{name} {i}" for name, (size, _) in blocks.items() for i in range(size)]
    parts = [(rng.standard_normal(size), signal) for size, signal in blocks.values()]
    truth = np.concatenate([s * v / np.linalg.norm(v) for v, s in parts])
    side = rng.standard_normal(len(truth))
    side -= (side @ truth) / (truth @ truth) * truth
    side *= np.linalg.norm(truth) / np.linalg.norm(side)
    angle = np.deg2rad(turns)[:, None]
    group = rng.choice(len(shares), count, p=shares)
    features = rng.standard_normal((count, len(truth)))
    models = np.cos(angle) * truth + np.sin(angle) * side
    margin = np.sum(features * models[group], axis=1)
    label = (margin + rng.logistic(size=count) > 0).astype(int)
    return (
        header,
        np.char.mod("%.4f", features).tolist(),
        label.tolist(),
        group.tolist(),
    )


def corrupted(labels, classes):
    """Return a random source for each label, and the label, which may be flipped."""
    rng = np.random.default_rng(0)
    source = rng.integers(0, len(FLIPS), len(labels))
    flips = rng.random(len(labels)) < FLIPS[source]
    places = [classes.index(label) for label in labels]
    labels = [classes[i ^ int(f)] for i, f in zip(places, flips, strict=True)]
    return source.tolist(), labels


def generated():
    """Write the records of all configs but that of the census."""
    blocks = {"strong": (5, 3.0), "weak": (5, 1.0), "noise": (10, 0.0)}
    header, cells, labels, _ = generate(TRAINING + VALIDATION, blocks)
    rows = [[*row, label] for row, label in zip(cells, labels, strict=True)]
    write("penalty_tuning.csv", [*header, "label"], rows)
    source, wrong = corrupted(labels[:TRAINING], (0, 1))
    own = zip(cells[:TRAINING], source, wrong, strict=True)
    found = [[*row, place, label] for row, place, label in own]
    write("sources_training.csv", [*header, "source", "label"], found)
    write("sources_validation.csv", [*header, "label"], rows[TRAINING:])
    for name, shares, turns in (
        ("group_fair", (0.8, 0.2), (0.0, 120.0)),
        ("group_robust", (0.6, 0.3, 0.1), (0.0, 60.0, 120.0)),
    ):
        made = generate(TRAINING, {"feature": (10, 6.0)}, turns, shares)
        rows = [
            [*row, place, label] for row, label, place in zip(*made[1:], strict=True)
        ]
        write(f"{name}.csv", [*made[0], "group", "label"], rows)


def census(file):
    """Write training records, some with wrong labels, and validation records."""
    with open(file, newline="", encoding="utf-8") as lines:
        header, *rows = ([cell.strip() for cell in row] for row in csv.reader(lines))
    place, order = header.index(LABEL), np.random.default_rng(0).permutation(len(rows))
    rows = [rows[i] for i in order[: TRAINING + VALIDATION]]
    source, labels = corrupted([row[place] for row in rows[:TRAINING]], CLASSES)
    write("census_validation.csv", header, rows[TRAINING:])
    for row, label in zip(rows[:TRAINING], labels, strict=True):
        row[place] = label
    own = zip(rows[:TRAINING], source, strict=True)
    write("census_training.csv", [*header, "source"], ([*row, s] for row, s in own))


if __name__ == "__main__":
    census(sys.argv[1]) if len(sys.argv) > 1 else generated()
