"""The command line: `pack` where the environment is, `run` where the GPU is.

What lives here: arguments. Standard library only. What may not: anything else.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import packages, runner
from .results import Place
from .steps import GROUPS, STEPS, UNPACKING

PACKED = runner.ROOT / ".gpu_check"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/gpu_check.sh", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    pack = commands.add_parser("pack", help="write the packages that a machine with only torch lacks to a folder")
    pack.add_argument("--to", type=Path, default=PACKED, help="folder (default: .gpu_check)")
    pack.add_argument("--carry", nargs="*", default=[], metavar="NAME", help=f"some of {', '.join(packages.EXPECTED)}")
    run = commands.add_parser("run", help="run the check on a machine with one GPU")
    run.add_argument(
        "--from", dest="packed", type=Path, default=PACKED, help="folder with the packed packages (default: .gpu_check)"
    )
    run.add_argument("--installed", action="store_true", help="use the installed packages and unpack nothing")
    run.add_argument("--only", nargs="+", choices=GROUPS, default=[], help="some groups of steps")
    run.add_argument("--continue", dest="go_on", action="store_true", help="skip steps that have passed")
    run.add_argument("--slower", type=float, metavar="N", help="N times as long a limit (default: 1; on a CPU 10)")
    step = commands.add_parser("step")
    step.add_argument("name", choices=[one.name for one in STEPS])
    step.add_argument("--report", type=Path, required=True)
    for command in (run, step):
        command.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
        command.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny runs everything on a CPU")
        command.add_argument("--work", type=Path, default=Path("/tmp/gpu_check"), help="default: %(default)s")
        command.add_argument("--out", type=Path, default=Path("out/gpu_check"), help="results (default: %(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if all passed, 1 if something failed, 2 if it could not begin."""
    args = _parser().parse_args(arguments)
    try:
        if args.command == "pack":
            manifest = packages.pack(args.to, args.carry)
            print(f"{len(manifest['packages'])} packages, {manifest['bytes'] / 1e6:.1f} MB, in {args.to}")
            print("expected there:", ", ".join(f"{name} {version}" for name, version in manifest["expected"].items()))
            return 0
        place = Place(args.device, args.size, args.work.resolve(), args.out.resolve())
        if args.command == "step":
            runner.run_step(args.name, place, args.report)
            return 0
        slower = args.slower or (1.0 if args.device == "cuda" else 10.0)
        site = None if args.installed else place.work / "site"
        if site is not None:
            print("unpacked:", ", ".join(packages.unpack(args.packed, site, UNPACKING * slower)))
    except packages.PackageError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    return 0 if runner.run_all(place, site, args.only, go_on=args.go_on, slower=slower) else 1


if __name__ == "__main__":
    sys.exit(main())
