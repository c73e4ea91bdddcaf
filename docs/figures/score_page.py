"""Screenshot of the page of `onefold score --report`: digits are familiar, half of the scored inputs are letters.

    python docs/figures/score_page.py

It needs chromium and playwright.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright

from onefold.data import digits, letters

PICTURE = Path(__file__).parent.parent / "images" / "score_page.png"
WIDTH, HEIGHT, SCALE = 1000, 1250, 0.8


def write(images: np.ndarray, folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    for i, pixels in enumerate(images):
        Image.fromarray((255 * pixels).astype(np.uint8)).save(folder / f"{name}{i:04}.png")


def main() -> None:
    familiar, chromium = digits(), shutil.which("chromium")
    assert chromium is not None, "chromium is not installed"
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        write(familiar.x_train, place / "photos", "digit")
        write(familiar.x_test[:200], place / "new", "digit")
        write(letters(200), place / "new", "letter")
        for words in ("fit photos -o model.onefold", "score model.onefold new -o scores.csv --report page.html"):
            subprocess.run([sys.executable, "-m", "onefold.cli", *words.split()], cwd=place, check=True)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            window = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=SCALE)
            tab = window.new_page()
            tab.goto((place / "page.html").as_uri())
            tab.wait_for_load_state()
            tab.screenshot(path=PICTURE)
            browser.close()


if __name__ == "__main__":
    main()
