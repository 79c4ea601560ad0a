"""Make or refresh `.venv` for `make setup`, with nothing but the standard library.

Usage: python tools/setup_venv.py [TORCH [TORCH_INDEX]], both explained in the Makefile.

Four steps: make the environment, check that packages can be had, install requirements.lock, install this
repository (editable). pip's own output goes to .venv/setup.log; what is shown is progress, and on failure
what failed and what to do about it.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
LOCK = ROOT / "requirements.lock"
LOG = VENV / "setup.log"
PROBE = "six"  # a small package of the lock, fetched first to see whether packages can be had at all
PROBING = "asking for one small package"
NETWORK_SIGNS = ("connection broken", "connectionerror", "timed out", "timeouterror", "name resolution")
NETWORK_SIGNS += ("max retries", "proxyerror", "sslerror")
SHOW_EVERY_S = 10


def locked() -> dict[str, str]:
    """Maps each locked package to its requirement line, `name==version`."""
    lines = [line.strip() for line in LOCK.read_text().splitlines()]
    return {line.partition("==")[0]: line for line in lines if line and not line.startswith("#")}


def fail(message: str) -> None:
    """Stops with the message; the stamp is not written, so the next `make setup` starts again."""
    sys.exit(f"\nmake setup failed: {message}\nThe full output of pip is in {LOG.relative_to(ROOT)}.")


def explain(what: str, output: str) -> None:
    """Stops with pip's errors, telling a missing network from every other failure."""
    lines = output.splitlines()
    errors = "\n".join([line for line in lines if line.startswith("ERROR")][-5:] or lines[-5:])
    probing = what == PROBING and "from versions: none" in output  # the index has it, if there is an index
    if probing or any(sign in output.lower() for sign in NETWORK_SIGNS):
        fail(
            f"no network, or no package index answers, while {what}:\n{errors}\n"
            "Connect (or point pip at a mirror or a folder of wheels, as in its documentation) and run the "
            "command again: what is already installed is kept."
        )
    fail(f"{what}:\n{errors}")


def pip(what: str, *arguments: str, total: int = 0) -> None:
    """Runs pip quietly; shows how many of `total` packages it has collected, every SHOW_EVERY_S seconds."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += [*arguments, "--progress-bar", "off"]
    started = shown = time.monotonic()
    output, collected = [], 0
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
        LOG.open("a") as log,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            log.write(line)
            collected += line.startswith(("Collecting ", "Processing "))
            now = time.monotonic()
            if total and line.startswith("Installing collected"):
                total = 0
                print(f"      all fetched, unpacking (a minute or two) ... {now - started:.0f} s", flush=True)
            elif collected < total and now - shown > SHOW_EVERY_S:
                shown = now
                print(f"      {collected} of {total} packages fetched, {now - started:.0f} s", flush=True)
    if process.returncode != 0:
        explain(what, "".join(output))


def install_lock(torch: str, index: str) -> None:
    """Installs every locked package, with `torch` in place of the locked torch if it is not empty."""
    wanted = locked()
    if torch:
        wanted["torch"] = torch
    requirements = VENV / "requirements.txt"
    requirements.write_text("\n".join(wanted.values()) + "\n")
    offline = [str(PYTHON), "-m", "pip", "install", "--no-index", "--no-deps", "-r", str(requirements)]
    if subprocess.run(offline, capture_output=True).returncode == 0:
        print("[2/4] every package is there already\n[3/4] nothing to install", flush=True)
        return
    print("[2/4] can packages be had?", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        patience = ["--timeout", "15", "--retries", "1"]
        pip(PROBING, "download", wanted[PROBE], "--no-deps", "-d", folder, *patience)
    print(f"[3/4] {len(wanted)} packages of requirements.lock (torch is the largest; some minutes)", flush=True)
    extra = ["--extra-index-url", index] if index else []
    pip("installing requirements.lock", "install", "-r", str(requirements), *extra, total=len(wanted))


def main() -> None:
    torch, index = (*sys.argv[1:], "", "")[:2]
    started = time.monotonic()
    print(f"[1/4] virtual environment .venv (Python {sys.version.split()[0]})", flush=True)
    made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True)
    if made.returncode != 0:
        sys.exit(f"make setup failed: python -m venv does not work here:\n{made.stdout}{made.stderr}")
    LOG.write_text("")
    install_lock(torch, index)
    print("[4/4] this repository, editable", flush=True)
    pip("installing sparselib", "install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    print(f"Set-up done in {time.monotonic() - started:.0f} s: .venv/bin/python", flush=True)


if __name__ == "__main__":
    main()
