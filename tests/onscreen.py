"""What a page shows of a view, measured on the screen: what is clipped, and how well texts stand out."""

CLIPPED = """(view) => {
    const found = [];
    const name = (element) => `${element.getAttribute('class') ?? element.tagName}: ${element.textContent}`;
    const isShown = (element) => element.checkVisibility() && element.getBoundingClientRect().width > 0;
    const isWithin = (inner, outer) => inner.left >= outer.left - 1 && inner.right <= outer.right + 1
        && inner.top >= outer.top - 1 && inner.bottom <= outer.bottom + 1;
    const edge = view.parentElement.getBoundingClientRect();
    if (view.scrollWidth > view.clientWidth + 1) found.push(`the view is ${view.scrollWidth} wide`);
    for (const text of view.querySelectorAll('.nbdist-picture .node text')) {
        const box = text.parentElement.querySelector('.box');
        if (!isWithin(text.getBoundingClientRect(), box.getBoundingClientRect())) found.push(name(text));
    }
    for (const label of view.querySelectorAll('.worker')) {
        if (!isWithin(label.firstChild.getBoundingClientRect(), label.getBoundingClientRect())) found.push(name(label));
    }
    for (const element of view.querySelectorAll('button, select, label, summary, span, li, th, td, .key, .value')) {
        if (element.closest('.nbdist-frame') || !isShown(element)) continue;
        const { left, right } = element.getBoundingClientRect();
        const cut = element.scrollWidth > element.clientWidth + 1 && getComputedStyle(element).display !== 'inline';
        if (left < edge.left - 1 || right > edge.right + 1 || cut) found.push(name(element));
    }
    return found;
}"""
"""What of a view cannot be read in full, though it is on the page: texts of boxes, lanes, buttons, tables, remarks."""

CONTRAST = """(view) => {
    const probe = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const light = (...layers) => {
        for (const [colour, opacity] of layers) {
            probe.globalAlpha = opacity;
            probe.fillStyle = colour;
            probe.fillRect(0, 0, 1, 1);
        }
        const [r, g, b] = [...probe.getImageData(0, 0, 1, 1).data].map((value) => {
            const part = value / 255;
            return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ratio = (text, behind, opacity = 1) => {
        const layers = [['#fff', 1], [behind, 1]];
        const [low, high] = [light(...layers), light(...layers, [text, opacity])].sort((one, other) => one - other);
        return (high + 0.05) / (low + 0.05);
    };
    const found = [];
    for (const node of view.querySelectorAll('.node')) {
        const box = getComputedStyle(node.querySelector('.box')).fill;
        for (const text of node.querySelectorAll('text')) {
            found.push([node.getAttribute('class'), ratio(getComputedStyle(text).fill, box)]);
        }
    }
    for (const lane of view.querySelectorAll('.worker')) {
        const { color, backgroundColor } = getComputedStyle(lane);
        found.push(['lane', ratio(color, backgroundColor)]);
    }
    let page = view;
    const isClear = (element) => getComputedStyle(element).backgroundColor === 'rgba(0, 0, 0, 0)';
    while (page.parentElement && isClear(page)) page = page.parentElement;
    const { backgroundColor } = getComputedStyle(page);
    const texts = '.nbdist-link, .nbdist-meaning-item span, .nbdist-details .key, .nbdist-status, summary';
    for (const text of view.querySelectorAll(texts)) {
        const { color, opacity } = getComputedStyle(text);
        found.push([text.className || text.tagName, ratio(color, backgroundColor, Number(opacity))]);
    }
    return found;
}"""
"""How much the texts of a view of a backward pass stand out from what is behind them, by WCAG."""
