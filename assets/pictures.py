"""The pictures of README, as SVG (curves and kinds need matplotlib).

    python assets/pictures.py rollout OUT.svg RUN/credit.html [N]        its first N (1) right and wrong rollouts, shaded by credit
    python assets/pictures.py curves OUT.svg rollouts,tokens,seconds "HP-RLVR=RUN,RUN" ...   reward over each of these: mean and range over the runs of an arm
    python assets/pictures.py kinds OUT.svg "before=RUN/place-tiny.json" ...   credit by token kind, as `evidence.py place` measured it
"""
import html
import json
import re
import sys
from pathlib import Path

PAPER, INK = "#fbfbfa", "#1c1c1e"  # a card of its own colour reads the same on light and on dark pages
COLOURS = ("#1f5fd0", "#d9480f", "#2b8a3e", "#862e9c", "#868e96", "#e6a700", "#0b7285")


def rollout(out: str, page: str, each: str = "1") -> None:
    text_of_page = Path(page).read_text(encoding="utf-8")
    width, line, char, left = 900, 26, 8.43, 20
    shapes, y = [], 34

    def text(x, y, content, style=""):
        shapes.append(f'<text x="{x:.1f}" y="{y}" xml:space="preserve" {style}>{html.escape(content)}</text>')

    pattern = r"<h2>{}, ([^<]*)</h2><pre class=prompt>(.*?)</pre><pre>(.*?)</pre>"
    for word in ("CORRECT", "INCORRECT"):
        for advantage, prompt, tokens in re.findall(pattern.format(word), text_of_page, re.DOTALL)[:int(each)]:
            text(left, y, f"{word}, {advantage}", 'font-weight="bold"')
            text(left + 300, y, next((part for part in html.unescape(prompt).splitlines() if "?" in part), "")[:60], 'opacity=".6"')
            x, y = left, y + line
            for style, content in re.findall(r'<span style="([^"]*)"[^>]*>(.*?)</span>', tokens, re.DOTALL):
                colour = re.search(r"rgba\([^)]*\)", style)
                for number, part in enumerate(html.unescape(content).split("\n")):
                    if number or x + len(part) * char > width - left:
                        x, y = left, y + line
                    if colour and part:
                        shapes.append(f'<rect x="{x:.1f}" y="{y - 17}" width="{len(part) * char:.1f}" height="23" rx="3" fill="{colour[0]}"/>')
                    text(x, y, part, "" if colour else 'opacity=".5"')
                    x += len(part) * char
            y += 2 * line if each == "1" else 1.4 * line
    Path(out).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y - line:.0f}" font-family="ui-monospace,Menlo,Consolas,monospace" font-size="14" fill="{INK}">'
        f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>{"".join(shapes)}</svg>\n', encoding="utf-8")


def canvas(columns: int):
    import matplotlib
    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    plt.rcParams |= {"svg.hashsalt": "0", "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK, "text.color": INK,
                     "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "font.size": 11}
    figure, axes = plt.subplots(1, columns, figsize=(9, 3.6), layout="constrained", facecolor=PAPER)
    for axis in (axes if columns > 1 else [axes]):
        axis.set_facecolor(PAPER)
    return figure, axes


SECONDS = tuple(f"seconds_{phase}" for phase in ("rollout", "verify", "credit", "update"))
TOKENS = ("generated_tokens", "scored_tokens", "trained_tokens")
AXES = dict(rollouts=("rollouts", lambda step: step["generated_tokens"] / step["response_tokens_mean"]),
            tokens=("thousand tokens sampled, scored and trained", lambda step: sum(step[key] for key in TOKENS) / 1000),
            seconds=("seconds of rollout, verification, credit and update", lambda step: sum(step[key] for key in SECONDS)))


def curves(out: str, over: str, *arms: str) -> None:
    import numpy as np
    chosen = [AXES[name] for name in over.split(",")]
    figure, axes = canvas(len(chosen))
    for colour, arm in zip(COLOURS, arms):
        name, folders = arm.split("=")
        runs = [[json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()][1:] for folder in folders.split(",")]
        reward = np.array([[step["reward_mean"] for step in run] for run in runs])
        smooth = np.array([[row[max(0, end - 9):end + 1].mean() for end in range(len(row))] for row in reward])
        for axis, (label, of_step) in zip(axes, chosen):
            x = np.array([[of_step(step) for step in run] for run in runs]).cumsum(1).mean(0)
            axis.plot(x, smooth.mean(0), color=colour, label=name)
            axis.fill_between(x, smooth.min(0), smooth.max(0), color=colour, alpha=0.15, linewidth=0)
            axis.set(xlabel=label, ylabel="reward, mean of ten steps")
    axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(out, metadata=dict(Date=None))


def kinds(out: str, *measured: str) -> None:
    figure, axis = canvas(1)
    names = ("right taken", "right wording", "right rest", "wrong dropped", "wrong taken", "wrong wording", "wrong rest")
    height = 0.8 / len(measured)
    for number, (colour, one) in enumerate(zip(COLOURS, measured)):
        label, path = one.split("=")
        credit = json.loads(Path(path).read_text())["credit_by_kind"]
        axis.barh([place + number * height for place in range(len(names))], [credit.get(name, 0) for name in names], height, color=colour, label=label)
    axis.set_yticks([place + 0.4 - height / 2 for place in range(len(names))],
                    [name.replace(" ", " rollout: ").replace("taken", "carry taken").replace("dropped", "carry dropped") for name in names])
    axis.invert_yaxis()
    axis.set(xlabel="mean credit")
    axis.legend(frameon=False, fontsize=9)
    figure.savefig(out, metadata=dict(Date=None))


if __name__ == "__main__":
    dict(rollout=rollout, curves=curves, kinds=kinds)[sys.argv[1]](*sys.argv[2:])
