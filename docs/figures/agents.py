"""Where the agents in results/agents went, and how they learned: pictures of the report about them.

    python docs/figures/agents.py

`onefold report results/agents` has all of them.
"""

import shutil
import tempfile
from pathlib import Path

from onefold.report import runs_page, runs_read

ROOT = Path(__file__).parent.parent.parent
PICTURES = {
    "visits_my_way_home_sparse.png": "agents_places.png",
    "curves_my_way_home_sparse.png": "agents_curves.png",
    "visits_my_way_home_very_sparse.png": "agents_places_very_sparse.png",
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        runs_page.write(runs_read.collect(ROOT / "results" / "agents"), Path(folder))
        for name, picture in PICTURES.items():
            shutil.copyfile(Path(folder) / "plots" / name, ROOT / "docs" / "images" / picture)
