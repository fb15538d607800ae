"""Draw the first right and the first wrong rollout of a credit.html as one SVG: python assets/rollout.py RUN/credit.html OUT.svg"""
import html
import re
import sys
from pathlib import Path

page = Path(sys.argv[1]).read_text(encoding="utf-8")
WIDTH, LINE, CHAR, LEFT = 900, 26, 8.43, 20
shapes, y = [], 34


def text(x, y, content, style=""):
    shapes.append(f'<text x="{x:.1f}" y="{y}" xml:space="preserve" {style}>{html.escape(content)}</text>')


for word in ("CORRECT", "INCORRECT"):
    match = re.search(rf"<h2>{word}, ([^<]*)</h2><pre class=prompt>(.*?)</pre><pre>(.*?)</pre>", page, re.DOTALL)
    if match is None:
        continue
    text(LEFT, y, f"{word}, {match[1]}", 'font-weight="bold"')
    x, y = LEFT, y + LINE
    for style, content in re.findall(r'<span style="([^"]*)"[^>]*>(.*?)</span>', match[3], re.DOTALL):
        token, colour = html.unescape(content), re.search(r"rgba\([^)]*\)", style)
        if "\n" in token:
            x, y, token = LEFT, y + LINE, token.replace("\n", "")
        if x + len(token) * CHAR > WIDTH - LEFT:
            x, y = LEFT, y + LINE
        if colour and token:
            shapes.append(f'<rect x="{x:.1f}" y="{y - 17}" width="{len(token) * CHAR:.1f}" height="23" rx="3" fill="{colour[0]}"/>')
        text(x, y, token, "" if colour else 'opacity=".5"')
        x += len(token) * CHAR
    y += 2 * LINE

Path(sys.argv[2]).write_text(
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y - LINE}" font-family="ui-monospace,Menlo,Consolas,monospace" font-size="14" fill="#1c1c1e">'
    f'<rect width="100%" height="100%" rx="8" fill="#fbfbfa"/>{"".join(shapes)}</svg>\n', encoding="utf-8")
