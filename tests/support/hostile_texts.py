"""Texts of a policy, a prompt or a reward that contain commands which no page may follow."""

MARKUP = [
    "<script>window.hit = 1</script>", "</script><script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>", "<svg onload=window.hit=1>",
    "<svg><script href='data:text/javascript,window.hit=1' /></svg>",
    "<iframe srcdoc='<script>parent.hit = 1</script>'></iframe>",
    "<a href='javascript:window.hit=1'>here</a>", "<base href='//evil.example/'>",
    "<meta http-equiv=refresh content='0;url=//evil.example'>", "<style>* { display: none }</style>",
    "<link rel=stylesheet href=//evil.example>", "<form action=//evil.example><button>send</button></form>",
    "<object data=//evil.example></object>", "<template><b>x</b></template>", "<!-- not closed",
    "<![CDATA[ x ]]>", "<?xml version='1.0'?>", "<title>else</title>",
    "&lt;b&gt; &amp;amp; &#x3c;script&#x3e;", "<plaintext>",
    "<math><mtext><img src=x onerror=window.hit=1></mtext></math>", "<details open ontoggle=window.hit=1>",
    "<input autofocus onfocus=window.hit=1>", '"><script>window.hit=1</script>', "'-window.hit=1-'",
    "${window.hit = 1}", "{{constructor.constructor('window.hit=1')()}}", "`${window.hit = 1}`",
    "javascript:window.hit=1", "data:text/html,<script>window.hit=1</script>",
]  # fmt: skip
CONTROLS = [
    "\x1b[2J\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\",
    "\x9b31m", "bell \x07 backspace \x08\x08", "nul \x00 within",
    "\r\nX-Header: 1\r\n\r\n<script>window.hit=1</script>", "vertical \x0b form \x0c feed", "\x7f delete",
    "carriage\rreturn",
]  # fmt: skip
UNICODE = [
    "\u202e right to left", "\u2066isolate\u2069 \u2067other\u2069", "\u200e\u200f\u061c marks",
    "zero\u200bwidth\u200cjoin\u200der", "\ufeff at the start", "soft\u00adhyphen",
    "line\u2028separator\u2029", "\ufff9annotation\ufffa\ufffb", "tags \U000e0041\U000e0042",
    "nonchar \ufffe \uffff \U0010ffff", "private \ue000 \U000f0000",
    "z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334" * 40, "👩‍👩‍👧‍👦 🏳️‍🌈", "ﷺ﷽𒐫",
    "\u1160 \u3164 \u115f fillers", "ＦＵＬＬ width",
]  # fmt: skip
OTHERS = [
    "", " \t \n ", '=HYPERLINK("http://evil.example")', "'; DROP TABLE samples; --",
    "../../../../etc/passwd", "%00%0a%0d", '{"step": NaN}', "%s%n%x{0}{}", "a" * 10_000_000, "\n" * 20_000,
]  # fmt: skip
TEXTS = [*MARKUP, *CONTROLS, *UNICODE, *OTHERS]
