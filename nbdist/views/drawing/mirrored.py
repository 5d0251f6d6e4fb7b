"""Turns the layout of a graph round, for a picture of a backward pass: its gradients go from left to right."""

from __future__ import annotations

from dataclasses import replace

from nbdist.views.drawing.layout import BreakMark, Lane, Layout, Point


def mirrored(layout: Layout, left: float) -> Layout:
    """Return the layout with boxes and lines from right to left, and its last row of lanes on top; `columns` stay."""
    rows: list[list[Lane]] = []
    for lane in layout.lanes:
        # Lanes of one row touch; between rows is a gap.
        if rows and rows[-1][-1].bottom == lane.top:
            rows[-1].append(lane)
        else:
            rows.append([lane])
    ends = [row[-1].bottom for row in rows]
    right = [left] * len(rows)

    def row_at(y: float) -> int:
        return next(number for number, end in enumerate(ends) if y <= end)

    for place in layout.places.values():
        row = row_at(place.y)
        right[row] = max(right[row], place.right)

    def down(y: float) -> float:
        row = row_at(y)  # the rows below it are above it afterwards, and the other way round
        return y - rows[row][0].top + layout.height - ends[row]

    def turned(point: Point) -> Point:
        x, y = point
        end = right[row_at(y)]  # of its own row: rows have different widths
        if x > end:  # where a line breaks off at the end of a row, it comes in at the beginning, and vice versa
            return left - 8, down(y)
        return (layout.width - 4 if x < left else left + end - x), down(y)

    return replace(
        layout,
        places={
            key: replace(place, x=left + right[row_at(place.y)] - place.right, y=down(place.y))
            for key, place in layout.places.items()
        },
        lanes=[Lane(lane.worker, down(lane.top), down(lane.bottom)) for row in rows[::-1] for lane in row],
        routes=[[[*map(turned, points)] for points in strokes] for strokes in layout.routes],
        marks=[
            BreakMark(layout.width - 5 if mark.x < left else left - 3, down(mark.y), mark.letters)
            for mark in layout.marks
        ],
    )
