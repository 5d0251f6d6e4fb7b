"""Drawings as images."""

import base64
import re

from nbdist.views.drawing.pictures import as_image, themed

SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="100" height="30"><title>all &amp; more</title>'
    '<g><title>a "b" &lt;c&gt;</title><rect x="10.4" y="2" width="20" height="5"/></g><g><rect/></g></svg>'
)


def test_an_image_with_the_titles_of_its_boxes():
    told = as_image(SVG)
    assert base64.b64decode(re.search(r"base64,([^\"]+)", told)[1]).decode() == SVG
    assert 'alt="all &amp; more"' in told
    assert re.findall(r"<span [^>]*>", told) == [
        '<span title="a &quot;b&quot; &lt;c&gt;" '
        'style="position:absolute;left:10.40%;top:6.67%;width:20.00%;height:16.67%">'
    ]


def test_it_is_made_smaller_then_scrolled_and_never_cut():
    outer, inner = re.findall(r'<div style="([^"]*)"', as_image(SVG))
    assert "overflow-x:auto" in outer
    assert "max-width:100px;min-width:66px" in inner
    assert "width:100%" in re.search(r"<img [^>]*>", as_image(SVG))[0]


def test_characters_that_no_picture_may_have():
    assert "<img" in as_image(SVG.replace("all", "a\x1bl\x0cl"))


def test_a_page_gives_html_its_font_size_and_colour():
    told = themed("<b>x</b>", "y")
    assert told.endswith(">xy</div>".replace("x", "<b>x</b>"))
    for variable in ("--jp-ui-font-family", "--jp-ui-font-size1", "--jp-ui-font-color1"):
        assert f"var({variable}, inherit)" in told  # a page without the variable has its own


def test_an_image_is_dark_where_a_trusted_page_is():
    told = as_image(SVG)
    assert told.startswith("<style>")  # which a page that is not trusted leaves out
    assert '[data-jp-theme-light="false"] .nbdist-image' in told
    assert 'class="nbdist-image"' in told
