"""The page in a browser: the charts are drawn, the tree can be walked through, and nothing is requested.

Needs Chromium (Debian: apt-get install chromium).
"""

import json
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from batchgen.report.page import page
from support.reports import job_page_data

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

WALK = """<script>
const wait = setInterval(() => {
  if (document.documentElement.dataset.charts !== "drawn") return;
  clearInterval(wait);
  document.querySelector("#node-children button").focus();
  document.activeElement.click();
  document.documentElement.dataset.walked = JSON.stringify([
    document.getElementById("node-text").textContent, document.getElementById("node-says").textContent,
    document.activeElement.id, [...document.querySelectorAll("#node-path button")].map((b) => b.textContent)]);
}, 50);
</script>
"""

WATCH = """<script>
const refused = [];
addEventListener("securitypolicyviolation", (event) => refused.push(event.blockedURI));
setInterval(() => {
  const entries = performance.getEntriesByType("resource").map((entry) => entry.name);
  const resources = entries.filter((name) => !name.startsWith("blob:")); // a blob is in the page's own memory
  document.documentElement.dataset.asked = JSON.stringify({ resources, refused });
}, 100);
</script>
"""


def browsed(html: str, folder: Path) -> str:
    """Opens the page, and returns what became of it."""
    file = folder / "page.html"
    file.write_text(html, "utf-8")
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,8000", f"--user-data-dir={folder / 'profile'}",
            "--disable-background-networking", "--disable-component-update",
            "--virtual-time-budget=15000", "--dump-dom", file.as_uri(),
        ],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return done.stdout


def told(dom: str, name: str) -> Any:
    """What a script of these tests has left at the page's root element, as JSON."""
    root = dom[dom.index("<html") : dom.index("<head")]
    return json.loads(unescape(root.partition(f'data-{name}="')[2].partition('"')[0]))


def data_with_a_tree() -> dict[str, Any]:
    data = job_page_data()
    tree = {
        "rows": 10, "prompt_tokens": 300, "saved_tokens": 110, "node_count": 5, "lone_rows": 1, "parents": [-1, 0],
        "node_rows": [9, 4], "ending_rows": [1, 4], "tokens": [10, 10], "saved": [80, 30], "nodes_below": [4, 0],
        "saved_below": [30, 0], "texts": ["The <b>first</b>\nnode", "The second one"],
    }  # fmt: skip
    return data | {"tree": tree}


def test_the_charts_are_drawn_and_the_tree_can_be_walked_through(tmp_path):
    html = page(data_with_a_tree())
    dom = browsed(html.replace("</body>", WALK + "</body>"), tmp_path)
    assert 'data-charts="drawn"' in dom
    assert dom.count('class="main-svg"') >= 7
    assert told(dom, "walked") == [
        "The <b>first</b>\nnode",
        "9 rows share these 10 tokens: 80 prompt tokens saved. Below: 4 nodes; rows that share nothing more: 1.",
        "node-text",
        ["all prompts", "“The <b>first</b> node”"],
    ]


def test_nothing_is_requested(tmp_path):
    html = page(data_with_a_tree()).replace("<style>", WATCH + "<style>", 1)
    assert told(browsed(html, tmp_path), "asked") == {"resources": [], "refused": []}


def test_a_request_would_be_refused(tmp_path):
    html = page(data_with_a_tree()).replace("<style>", WATCH + "<style>", 1)
    evil = '<img src="http://other.invalid/x.png"><script src="http://other.invalid/y.js"></script>'
    refused = told(browsed(html.replace("<header>", evil + "<header>"), tmp_path), "asked")["refused"]
    assert sorted(refused) == ["http://other.invalid/x.png", "http://other.invalid/y.js"]
