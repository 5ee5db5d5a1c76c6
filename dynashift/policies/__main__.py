"""python -m dynashift.policies: bring the table in README.md up to date."""

from dynashift.policies import FOLDER, table

readme = FOLDER / "README.md"
text, mark = readme.read_text(), "<!-- table -->\n"
readme.write_text(text[: text.index(mark)] + mark + table() + "\n")
