"""Drawings as images."""

import base64
import re

from nbdist.pictures import as_image

SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="100" height="30"><title>all &amp; more</title>'
    '<g><title>a "b" &lt;c&gt;</title><rect x="10.4" y="2" width="20" height="5"/></g><g><rect/></g></svg>'
)


def test_an_image_with_the_titles_of_its_boxes():
    told = as_image(SVG)
    assert base64.b64decode(re.search(r"base64,([^\"]+)", told)[1]).decode() == SVG
    assert 'alt="all &amp; more"' in told
    assert re.findall(r"<area [^>]*>", told) == [
        '<area shape="rect" coords="10,2,30,7" title="a &quot;b&quot; &lt;c&gt;">'
    ]
    name = re.search(r'usemap="#([^"]+)"', told)[1]
    assert f'<map name="{name}">' in told
    assert name != re.search(r'usemap="#([^"]+)"', as_image(SVG.replace("10.4", "10.5")))[1]


def test_characters_that_no_picture_may_have():
    assert "<img" in as_image(SVG.replace("all", "a\x1bl\x0cl"))
