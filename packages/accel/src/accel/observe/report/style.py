"""The look of the page: light and dark, and as wide as the screen."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--text:#1c2430;--soft:#5b6675;--line:#dfe3e9;
--grid:#e8ebf0;--warn:#b3261e;--warn-page:#fdecea;
--c0:#2f6bd0;--c1:#d1700f;--c2:#23865a;--c3:#a8439a;--c4:#6d5bd0;--c5:#b98a00;--c6:#1b8ea6;--c7:#7b8492;
--data:#e08a2e;--forward:#4c86e0;--backward:#2a4f9e;--optimizer:#2e9b6b;--collectives:#c9504a;
--checkpoint:#9259b8;--other:#a9b1bd}
@media (prefers-color-scheme:dark){:root{--page:#14181e;--card:#1d232b;--text:#e4e8ee;--soft:#9aa5b4;
--line:#323b47;--grid:#2b333e;--warn:#ff9a91;--warn-page:#3a2322;
--c0:#75a7ff;--c1:#ffa452;--c2:#5ecb97;--c3:#e58ad8;--c4:#a99bff;--c5:#e8c24a;--c6:#58c9df;--c7:#a7b0bd;
--data:#f0a354;--forward:#7aaaf5;--backward:#5577c9;--optimizer:#4fbb8a;--collectives:#e0736c;
--checkpoint:#b487d6;--other:#6c7684}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:15px/1.5 system-ui,sans-serif}
main{max-width:1160px;margin:0 auto;padding:20px 16px 48px}
h1{font-size:1.6rem;margin:0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:34px 0 12px}
h3{font-size:.95rem;margin:0 0 8px;overflow-wrap:anywhere}
.soft{color:var(--soft);margin:4px 0 0}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;min-width:0}
section>.card+.card{margin-top:14px}
.grid{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr))}
.facts{display:flex;flex-wrap:wrap;gap:6px 34px;margin:0 0 16px}
.facts div{min-width:0}
.facts dt{color:var(--soft);font-size:.82rem}
.facts dd{margin:0;font-size:1.3rem;font-variant-numeric:tabular-nums}
svg{display:block;width:100%;height:auto}
svg .axes line{stroke:var(--grid)}
svg text{fill:var(--soft);font-size:12px}
polyline{fill:none;stroke-width:1.7;stroke-linejoin:round}
.gap{stroke:var(--warn);stroke-width:1.6;fill:none}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:8px 0 0;padding:0;list-style:none;font-size:.88rem}
.legend li{overflow-wrap:anywhere}
.legend i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:6px}
.rank{display:grid;grid-template-columns:5.6em 1fr 4.6em;gap:10px;align-items:center;margin:5px 0;
font-size:.88rem;font-variant-numeric:tabular-nums}
.rank b{font-weight:500}
.rank span{text-align:right}
.bar{display:flex;height:20px;border-radius:4px;overflow:hidden;background:var(--grid)}
.bar i{display:block}
.slow{background:var(--warn-page);color:var(--warn);border-radius:8px;padding:8px 12px;margin:0 0 12px}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:4px 10px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{color:var(--soft);font-weight:500}
th:first-child,td:first-child,.text td,.text th{text-align:left}
.text td{white-space:pre-wrap;overflow-wrap:anywhere}
figure{margin:0}
figure img{max-width:100%;min-width:96px;border-radius:6px;image-rendering:pixelated;display:block}
figcaption{color:var(--soft);font-size:.82rem;margin-top:6px;overflow-wrap:anywhere}
.pictures{display:flex;flex-wrap:wrap;gap:14px}
@media (max-width:520px){svg text{font-size:17px}.card{padding:12px}}
"""
