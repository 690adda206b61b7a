"""What mkdocs hooks in (`hooks` in mkdocs.yml), so that the pages of the repository are those of the site, unchanged.

README, CONTRIBUTING, CHANGELOG and SECURITY become pages, links are followed from where the files lie, and the rules
enter the navigation by family.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parent.parent
TOP = {name: f"{name.lower()}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY")} | {"README": "index.md"}
"""Pages at the top of the repository, and what they are on the site."""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#:]+)((?:#[^)\s]*)?)\)")
_MERMAID = re.compile(r"^```mermaid\n.*?^```\n", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation with the families of rules, as the page of all rules has them."""
    catalogue = (REPOSITORY / "docs" / "rules" / "README.md").read_text(encoding="utf-8")
    families: list[Any] = ["rules/README.md"]
    for title in re.findall(r"^## (.*)", catalogue, re.MULTILINE):
        families.append({title.replace("`", ""): f"rules/{title[:3]}.md"})
    config.nav = [{"Rules": families} if item == {"Rules": "rules/README.md"} else item for item in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of the site, with the pages at the top of the repository."""
    for name, page in TOP.items():
        files.append(File.generated(config, page, abs_src_path=str(REPOSITORY / f"{name}.md")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A page whose links lead to pages of the site; a graph that is drawn by a code host stays text alone."""
    own = page.file.src_uri
    source = next((f"{name}.md" for name, uri in TOP.items() if uri == own), f"docs/{own}")

    def followed(match: re.Match[str]) -> str:
        mark, text, target, anchor = match.groups()
        target = normpath(join(dirname(source), target))
        if not (REPOSITORY / target).exists():
            return match[0]  # mkdocs says that it leads nowhere
        there = TOP.get(target.removesuffix(".md"), target.removeprefix("docs/"))
        if files.get_file_from_path(there) is None:
            return text  # a file of the repository that is no page
        return f"{mark}[{text}]({relpath(there, dirname(own) or os.curdir)}{anchor})"

    return _LINK.sub(followed, _MERMAID.sub("", markdown))
