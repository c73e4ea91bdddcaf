"""The programs in examples/ are those that the guide shows, whose code tests/test_docs.py runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "guides" / "agents.md").read_text("utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_guide_shows_the_example(path: Path) -> None:
    docstring, code = re.fullmatch(r'(""".+?"""\n)\n(.+)', path.read_text("utf-8"), re.DOTALL).groups()  # pyright: ignore[reportOptionalMemberAccess]
    assert f"```python\n{code}```" in GUIDE, f"{path.name} differs from docs/guides/agents.md"
    assert docstring.endswith('."""\n')


def test_every_program_of_the_guide_is_an_example() -> None:
    assert GUIDE.count("```python") == len(EXAMPLES) == 3
