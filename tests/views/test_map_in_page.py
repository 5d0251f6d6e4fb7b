"""The map of a swarm in a real page, of real workers: one is killed by its button while a text is written."""

import re

import pytest
from helpers.notebook.browser import needs_browser, notebook

pytestmark = [needs_browser(), pytest.mark.timeout(240)]

START = """
%load_ext nbdist
%dist_init -n 3 --backend none
import nbdist, torch, transformers
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=6,
    num_attention_heads=4, num_key_value_heads=2,
)).eval()
"""
SERVE = """
sw = nbdist.swarm.serve(model, workers=[2, 0, 1], spans=[(4, 6), (0, 2), (2, 4)], cache_bytes=1_000_000)
sw
"""
WRITE = """
import os, time
def slowly(ids, scores, **more):  # so that there is time for a press, however fast the swarm is
    time.sleep(0.02)
    while (gate := {150: "gone", 250: "end"}.get(ids.shape[1])) and not os.path.exists(gate):
        time.sleep(0.02)
    return torch.zeros(len(ids), dtype=torch.bool)

ids = torch.tensor([[5, 7, 11]])
how = dict(do_sample=False, min_new_tokens=300, max_new_tokens=300, pad_token_id=0)
found = sw.causal_lm().generate(ids, **how, stopping_criteria=[slowly])
print("the same:", torch.equal(found, model.generate(ids, **how)))
"""


def press(button):
    button.click()


def press_by_keys(button):
    button.focus()
    button.press("Enter")


@pytest.mark.parametrize(
    ("front", "press"),
    [
        pytest.param("lab", press, id="lab"),
        pytest.param("notebook", press_by_keys, id="notebook", marks=pytest.mark.soak),
    ],
)
def test_a_worker_is_killed_while_a_text_is_written(front, press, tmp_path, request):
    with notebook([START, SERVE, WRITE, "%dist_shutdown", "sw"], front, tmp_path) as page:
        page.finish(0)
        page.finish(1)
        view = page.cell(1).locator(".nbdist-map")
        view.get_by_text("3 workers: 3 online").wait_for()
        rows = view.locator("tbody tr")
        page.expect(rows).to_have_count(4)  # one is for blocks that nobody has, and hidden
        page.expect(rows.nth(3)).to_be_hidden()
        assert [held(rows.nth(n)) for n in range(3)] == [60, 60, 60]
        page.expect(rows.locator("td:first-child")).to_contain_text(["worker0", "worker1", "worker2"])
        for width in (1050, 700):
            page.page.set_viewport_size({"width": width, "height": 1000})
            page.page.wait_for_function("el => el.scrollWidth <= el.clientWidth", arg=frame(view))
        page.run(2)
        view.get_by_text(re.compile(r"writing, \d+ tokens, .* tokens/s")).wait_for()
        page.expect(view).to_contain_text("route: worker0 0-1 → worker1 2-3 → worker2 4-5")
        page.expect(view).to_contain_text(
            re.compile(r"used by notebook: 1 session, [\d.]+ tokens/s, [\d.]+ KB of caches")
        )
        assert [held(rows.nth(n), "route") for n in range(3)] == [60, 60, 60]
        page.expect(rows.nth(0)).to_contain_text(" KB of 1.0 MB")
        press(view.get_by_role("button", name="Kill worker2"))
        view.get_by_text("2 online, 1 gone").wait_for()
        (tmp_path / "gone").touch()  # if the text has come that far, it goes on by another route
        view.get_by_text(re.compile(r"→ worker[01] (4-5|2-5)")).wait_for()
        if picture := request.config.getoption("--pictures"):
            page.page.wait_for_timeout(1000)
            view.screenshot(path=f"{picture}/{'map' if front == 'lab' else f'map-{front}'}.png")
        assert page.cell(2).locator(".jp-InputPrompt").text_content() == "[*]:"  # it is still busy
        assert sum(held(rows.nth(n), "route") for n in range(2)) == 180
        (tmp_path / "end").touch()
        page.ended(2)
        page.tells(2, "the same: True")
        page.expect(rows.nth(3)).to_be_hidden()  # all blocks are with somebody
        page.expect(rows.nth(2).get_by_text("gone", exact=True)).to_be_visible()
        assert held(rows.nth(2)) == 0
        page.expect(view.get_by_role("button", name="Kill worker2")).to_be_disabled()
        page.expect(view.locator(".nbdist-log")).to_contain_text("worker2, which had blocks 4-5, is gone")
        page.expect(rows.locator("td:first-child")).to_contain_text(["worker0", "worker1", "worker2"])
        page.finish(3)
        for index in (1, 4):  # the view that was there, and one of a swarm that is over already
            if index == 4:
                page.finish(4)
            page.cell(index).get_by_text("this swarm is over; it had 6 blocks").wait_for()
            page.expect(page.cell(index).get_by_role("button", name="Kill")).to_have_count(0)
            page.expect(page.cell(index).locator(".nbdist-map")).to_have_count(0)
            shown = page.expect(page.cell(index).locator(".jp-OutputArea").first)
            shown.not_to_contain_text("nobody", use_inner_text=True)
        assert not page.complaints
        assert not page.strangers


def frame(view):
    """What scrolls if the rows are too wide."""
    return view.locator(".nbdist-rows").element_handle()


def held(row, kind="held"):
    """How wide the blocks of a row are that are drawn so."""
    return sum(float(each.get_attribute("width")) for each in row.locator(f"rect.{kind}").all())
