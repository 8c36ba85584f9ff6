"""`make test-browser`: the tests that need a browser, in a Chromium that is there or that apt can install.

If there is none, the last line begins with SKIPPED and says how to get one; the exit code is then 0, unless
`BROWSER=required` is set. `CHROMIUM` names an executable.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
HOW = "Debian: apt-get install chromium; elsewhere name one with CHROMIUM=/path/to/chromium"


def main() -> None:
    """Install what is missing, as far as that is possible, and run the tests."""
    if any(importlib.util.find_spec(name) is None for name in ("jupyterlab", "playwright", "anywidget")):
        print("[browser] installing JupyterLab and Playwright", flush=True)
        wanted = pins("browser") + pins("notebook")
        if subprocess.call([sys.executable, "-m", "pip", "install", "--quiet", *wanted], cwd=ROOT) != 0:
            skip("JupyterLab and Playwright could not be installed; see pip's message above")
    chromium = found() or installed()
    if chromium is None:
        skip(f"there is no Chromium, and it could not be installed. {HOW}")
    if not starts(chromium):
        skip(f"{chromium} does not start. {HOW}")
    shots = Path(os.environ.setdefault("BROWSER_SHOTS", str(ROOT / "build" / "screenshots")))
    print(f"[browser] {chromium}; pictures go to {shots}", flush=True)
    command = [sys.executable, "-m", "pytest", "tests/browser", "--browser", chromium, *sys.argv[1:]]
    sys.exit(subprocess.call(command, cwd=ROOT))


def pins(extra: str) -> list[str]:
    """The requirements of an extra, as pyproject.toml has them."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return list(project["optional-dependencies"][extra])


def found() -> str | None:
    """The installed Chromium."""
    given = os.environ.get("CHROMIUM")
    if given:
        return shutil.which(given)
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def installed() -> str | None:
    """Debian's Chromium, where apt may install it."""
    if os.environ.get("CHROMIUM") or not shutil.which("apt-get") or os.geteuid() != 0:
        return None
    print("[browser] installing Chromium with apt", flush=True)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", "chromium"]):
        try:
            subprocess.run(["apt-get", *command], env=environment, timeout=600, check=False, **quiet)
        except subprocess.TimeoutExpired:
            return None
    return found()


def starts(chromium: str) -> bool:
    """Whether it starts here: a library may be missing."""
    command = [chromium, "--headless", "--no-sandbox", "--dump-dom", "about:blank"]
    try:
        return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def skip(why: str) -> None:
    """Exit with a message that nothing was tested."""
    print(f"SKIPPED the browser tests: {why}", flush=True)
    sys.exit(1 if os.environ.get("BROWSER") == "required" else 0)


if __name__ == "__main__":
    main()
