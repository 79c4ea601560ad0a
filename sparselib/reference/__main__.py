"""``python -m sparselib.reference FOLDER``."""

import argparse
import sys
from pathlib import Path

from . import __doc__ as about
from . import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m sparselib.reference",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of .safetensors files")
    sys.exit(main(parser.parse_args().folder))
