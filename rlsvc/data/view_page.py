"""The page of `view.py`: its frame, style and script. One script moves a line over the plots with the videos."""

GENERATOR = '<meta name="generator" content="rlsvc dataset view">'

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{generator}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; --soft: #8881; --dim: #777; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; margin: 0; }}
h2 {{ font-size: 1.1rem; margin: 0 0 .3rem; font-weight: 500; }}
h2 b {{ display: inline-block; min-width: 2ch; color: var(--dim); }}
header p {{ color: var(--dim); margin: .2rem 0 1.5rem; }}
section {{ border: 1px solid var(--line); border-radius: 10px; padding: 1rem; margin: 0 0 1.2rem; }}
.facts span {{ background: var(--soft); border-radius: 6px; padding: .1rem .5rem; margin-right: .4rem;
  font-size: .85rem; white-space: nowrap; }}
.facts {{ margin: .2rem 0 .8rem; }}
.videos {{ display: flex; flex-wrap: wrap; gap: .8rem; }}
figure {{ margin: 0; flex: 1 1 260px; max-width: 420px; }}
video {{ width: 100%; border-radius: 6px; background: #000; display: block; }}
figcaption {{ color: var(--dim); font-size: .85rem; }}
button {{ font: inherit; padding: .15rem .9rem; margin: .6rem 0; border-radius: 6px; border: 1px solid var(--line);
  background: var(--soft); cursor: pointer; }}
.plot p {{ margin: .5rem 0 .2rem; font-size: .85rem; }}
.plot span {{ margin-left: .7rem; white-space: nowrap; }}
.plot i {{ display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .3em; }}
.plot em {{ float: right; color: var(--dim); font-style: normal; }}
svg {{ width: 100%; height: 150px; display: block; border: 1px solid var(--line); border-radius: 6px;
  cursor: pointer; }}
polyline {{ fill: none; stroke-width: 1.5; vector-effect: non-scaling-stroke; }}
.person {{ fill: #f59e0b; opacity: .22; }}
.now {{ stroke: currentColor; stroke-width: 1; vector-effect: non-scaling-stroke; }}
.key {{ display: inline-block; width: .9em; height: .9em; background: #f59e0b55; vertical-align: -.1em; }}
</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p>{about} · <span class="key"></span> a person acted · dashed: asked for before the guard</p>
</header>
{body}
<script>
for (const section of document.querySelectorAll("section")) {{
  const videos = [...section.querySelectorAll("video")], button = section.querySelector("button");
  const lines = section.querySelectorAll(".now"), seconds = Number(section.dataset.seconds);
  if (!videos.length) button.remove();
  const show = time => lines.forEach(line => {{
    const x = 1000 * Math.min(1, time / seconds);
    line.setAttribute("x1", x);
    line.setAttribute("x2", x);
  }});
  const tick = () => {{
    show(videos[0].currentTime);
    if (!videos[0].paused) requestAnimationFrame(tick);
    else button.textContent = "play";
  }};
  button.onclick = () => {{
    const paused = videos[0].paused;
    videos.forEach(video => paused ? video.play() : video.pause());
    button.textContent = paused ? "pause" : "play";
    if (paused) requestAnimationFrame(tick);
  }};
  section.querySelectorAll("svg").forEach(svg => svg.onclick = event => {{
    const box = svg.getBoundingClientRect(), time = seconds * (event.clientX - box.left) / box.width;
    videos.forEach(video => video.currentTime = time);
    show(time);
  }});
}}
</script>
</body>
</html>
"""
