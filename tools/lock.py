"""Write requirements.lock: the exact version of every package that pyproject.toml's dependencies need.

Called by `make lock`. pip resolves without installing; this script keeps names and versions only. Left out:
the package itself, the local label of a torch build (`+cpu`, `+cu130`), and the CUDA libraries, which pip
adds by itself where a CUDA build of torch is installed. So one lock serves every build of torch.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = "# Exact versions, made by `make lock` from pyproject.toml. Do not edit by hand.\n"
CUDA_ONLY = ("nvidia-", "cuda-", "triton")


def resolve(pip_options: list[str]) -> list[dict[str, str]]:
    """The name and version of every package pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", str(report), *pip_options, f"{ROOT}[book,test]"]
        subprocess.run(command, check=True)
        return [item["metadata"] for item in json.loads(report.read_text())["install"]]


def main() -> None:
    """Usage: python tools/lock.py [pip options and extra requirements, for example torch==2.13.0]"""
    print("Resolving every dependency (one or two minutes) ...", flush=True)
    lines = {
        f"{package['name'].lower().replace('_', '-')}=={package['version'].partition('+')[0]}\n"
        for package in resolve(sys.argv[1:])
        if package["name"] != "sparselib" and not package["name"].lower().startswith(CUDA_ONLY)
    }
    (ROOT / "requirements.lock").write_text(HEADER + "".join(sorted(lines)))
    print(f"requirements.lock: {len(lines)} packages")


if __name__ == "__main__":
    main()
