"""Much output, from many workers, while the notebook is busy: nothing is lost, doubled or mixed up."""

from frontend import Notebook


def test_four_workers_print_ten_thousand_lines_each_while_the_notebook_is_busy():
    with Notebook() as notebook:
        notebook.run("%dist_init -n 4 --backend none -t 60")
        cell = notebook.run("%%remote -a\nfor i in range(10_000):\n    print('line', i, 'of', rank)")
        notebook.run(
            "handle = _\nfor _ in range(20_000_000): pass"
        )  # the main thread does not let go of the GIL freely
        notebook.run("handle.wait()", timeout=120)
        notebook.until(lambda: cell.stdout.count("\n") >= 40_000, timeout=60)
        lines = cell.stdout.splitlines()
        assert len(lines) == 40_000
        for rank in range(4):
            mine = [line for line in lines if line.startswith(f"[worker{rank}]")]
            assert mine == [f"[worker{rank}] line {i} of {rank}" for i in range(10_000)]
