// How large the picture is: as large as there is room for, or as somebody wants it.

export const LEAST = 0.8; // a picture is not fitted smaller than that: its texts could not be read
const [SMALLEST, LARGEST] = [0.25, 3];
export const STEP = 1.25;

/** The scale at which a picture fits, without its texts getting too small; else it is scrolled. */
export function fitting(width, room) {
  return room > 0 ? Math.min(1, Math.max(LEAST, room / width)) : 1;
}

/** Keeps the scale of the picture in a frame. `draw(scale)` sizes it, `measure()` tells its width and the room for it. */
export function zoomed(frame, measure, draw) {
  let wanted = null; // a scale that somebody has chosen
  let scale = 1;

  function apply() {
    const { width, room } = measure();
    if (!(room > 0)) return; // it is not on the page, or folded away
    scale = wanted ?? fitting(width, room);
    draw(scale);
  }

  /** Scales by a factor; what is at a point of the frame stays there. */
  function by(factor, x = frame.clientWidth / 2, y = frame.clientHeight / 2) {
    const [before, left, top] = [scale, frame.scrollLeft, frame.scrollTop];
    wanted = Math.min(LARGEST, Math.max(SMALLEST, scale * factor));
    apply();
    frame.scrollLeft = ((left + x) * scale) / before - x;
    frame.scrollTop = ((top + y) * scale) / before - y;
  }

  function fit() {
    wanted = null;
    apply();
  }

  function wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault(); // else the page is zoomed
    const { left, top } = frame.getBoundingClientRect();
    by(event.deltaY < 0 ? STEP : 1 / STEP, event.clientX - left, event.clientY - top);
  }

  const resized = new ResizeObserver(apply);
  resized.observe(frame);
  frame.addEventListener("wheel", wheel, { passive: false });
  return { apply, by, fit, close: () => resized.disconnect() };
}
