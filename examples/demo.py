"""Weights data sources privately, end to end, through the command line."""

import argparse
import datetime
import sys
from pathlib import Path

from dpbilevel.cli import results
from dpbilevel.cli.main import main as dpbilevel

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Runs the demo and prints what was released next to what is true."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--adult", default="", help="the Adult CSV file, if at hand")
    parser.add_argument("--out", type=Path, help="a new result folder")
    arguments = parser.parse_args()
    out = arguments.out or _fresh_folder()

    command = ["run", *_config(arguments.adult), "--out", str(out)]
    print("$ dpbilevel", *command, "\n", flush=True)
    code = dpbilevel(command)
    if code == 0:
        _compare(out)
    return code


def _config(adult: str) -> list[str]:
    """Says which records are used, and names the config for them."""
    if adult and Path(adult).is_file():
        print(f"Records: the Adult census data in {adult}.")
        return [str(ROOT / "configs" / "census.toml"), "--data", adult]
    if adult:
        print(f"There is no file {adult}.")
    print("Records: generated ones (pass --adult CSV to use the Adult census data).")
    return [str(ROOT / "configs" / "source_reweighting.toml")]


def _fresh_folder() -> Path:
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    return Path("runs") / f"demo-{now}"


def _compare(out: Path) -> None:
    """Prints the released weights next to the corruption that the config made."""
    result = results.load(out)
    flips = result.config["data"]["sources"]["flip"]
    print("\nsource   labels flipped   released weight")
    for source, (flip, weight) in enumerate(zip(flips, result.shown, strict=True)):
        print(f"{source:6}   {flip:14.0%}   {weight:15.3f}  {'#' * round(50 * weight)}")
    clean = sum(w for w, flip in zip(result.shown, flips, strict=True) if flip == 0)
    print(
        f"\nThe clean sources got {clean:.0%} of the weight (uniform: "
        f"{flips.count(0) / len(flips):.0%}), with epsilon = "
        f"{result.report.epsilon:.3g} at delta = {result.report.delta:.3g}."
    )
    print(f"Figure: {out / 'figure.png'}")


if __name__ == "__main__":
    sys.exit(main())
