"""Much output, from many workers, while the notebook is busy: nothing is lost, doubled or mixed up."""

from helpers.notebook.frontend import Notebook


def test_four_workers_print_ten_thousand_lines_each_while_the_notebook_is_busy(tmp_path):
    with Notebook() as notebook:
        notebook.run("%dist_init -n 4 --backend none -t 60")
        cell = notebook.run("%%remote -a\nfor i in range(10_000):\n    print('line', i, 'of', rank)")
        number = cell.reply["content"]["execution_count"]
        notebook.run(
            "handle = _\nfor _ in range(20_000_000): pass"
        )  # the main thread does not let go of the GIL freely
        notebook.run("handle.wait()", timeout=120)
        notebook.until(lambda: cell.stdout.count("\n") >= 4 * 4001, timeout=60)
        lines = cell.stdout.splitlines()
        assert len(lines) == 4 * 4001
        notebook.run(f"%dist_log --cell {number} --save {tmp_path}/printed.txt")
        printed = (tmp_path / "printed.txt").read_text().splitlines()
        for rank in range(4):
            said = [f"[worker{rank}] line {i} of {rank}" for i in range(10_000)]
            assert [line for line in printed if line.startswith(f"[worker{rank}]")] == said
            said[2000:8000] = [f"[worker{rank}] 6,000 lines left out: `%dist_log worker{rank} --cell {number}`"]
            assert [line for line in lines if line.startswith(f"[worker{rank}]")] == said
