//! The report as one page of HTML that needs nothing else: no script, no font, no address. The style sheet is beside this
//! file. Numbers come from [`Report`] as they are; prompt text stands in the examples alone.

mod arms;
mod examples;
mod headroom;
mod ledger;
mod the_loop;

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::{Report, verdict::Verdict};
use crate::demo::{
    interval::Interval,
    number::{or_dash, percent, range, signed},
    tally::{FROZEN, LEARNING},
};

const STYLE: &str = include_str!("page/style.css");

impl Report {
    /// The whole page.
    pub fn page(&self) -> String {
        let page = html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    meta name="color-scheme" content="light dark";
                    title { "Springtide: " (self.title()) }
                    style { (PreEscaped(STYLE)) }
                }
                body {
                    main {
                        (self.top())
                        (self.headroom_section())
                        (self.over_time_section())
                        (self.by_version_section())
                        (self.examples_section())
                        (self.policy_section())
                        (self.loop_section())
                        (self.ledger_section())
                        (self.run_section())
                    }
                }
            }
        };
        page.into_string()
    }

    fn top(&self) -> Markup {
        let tone = match self.verdict() {
            Verdict::Better => "good",
            Verdict::Quieter | Verdict::Unclear | Verdict::Unknown => "open",
            Verdict::Worse => "bad",
        };
        html! {
            header class=(tone) {
                p .kicker {
                    "Springtide · policy " (self.parameters.policy) " · " (moment(&self.started_at)) " · "
                    (or_dash(Some(self.seconds / 60.0), 1)) " min · seed " (self.parameters.seed)
                }
                h1 { (self.title()) "." }
                @for sentence in self.sentences() { p .lead { (minus(&sentence)) } }
                (self.tiles())
                (self.doubts())
                p .legend {
                    span .learning { "learning arm (" (LEARNING) ")" }
                    span .frozen { "frozen arm (" (FROZEN) ")" }
                    " Bands and whiskers are 95% intervals, clustered by user. Reward: accept "
                    (signed(Some(1.0 - self.parameters.tau), 2)) ", reject "
                    (minus(&signed(Some(-self.parameters.tau), 2))) ", decline 0."
                }
            }
        }
    }

    fn tiles(&self) -> Markup {
        let [learning, frozen] = self.both();
        let difference = |interval: Option<Interval>, digits| {
            interval.map(|d| format!("{:+.digits$} (95% {})", d.mean, range(Some(d.ci95), digits)))
        };
        let waits = &self.feedback_to_serving_seconds;
        let tiles = [
            (
                "reward per pause",
                signed(learning.reward_mean, 3),
                format!("{FROZEN} {}", signed(frozen.reward_mean, 3)),
                difference(self.difference, 3),
            ),
            (
                "accepts per 100 pauses",
                or_dash(learning.accepts_per_100, 1),
                format!("{FROZEN} {}", or_dash(frozen.accepts_per_100, 1)),
                difference(self.difference_accepts_per_100, 1),
            ),
            (
                "pauses with a suggestion",
                percent(learning.show_rate, 0),
                format!("{FROZEN} {}", percent(frozen.show_rate, 0)),
                None,
            ),
            (
                "from feedback to serving",
                format!("{} s", or_dash(waits.p50, 1)),
                format!("median; 95% within {} s", or_dash(waits.p95, 1)),
                Some(format!("{} steps, {} versions", self.steps, self.versions_served.len())),
            ),
        ];
        html! {
            div .tiles {
                @for (name, value, beside, below) in tiles {
                    div .tile {
                        p { (name) }
                        p .value { (minus(&value)) }
                        p { (minus(&beside)) }
                        @if let Some(below) = below { p { (minus(&below)) } }
                    }
                }
            }
        }
    }

    /// What would make a reader trust the numbers less.
    fn doubts(&self) -> Markup {
        let doubts = [
            (!self.ledger.balanced, "The ledger does not add up."),
            (
                !self.roots_agree,
                "Some answers named a root that is not the one the trainer committed.",
            ),
            (
                !self.settled,
                "Some generations were still on their way when the figures were taken.",
            ),
            (self.interrupted, "The run was ended early by hand."),
        ];
        html! {
            @for (holds, text) in doubts {
                @if holds { p .doubt { (text) } }
            }
        }
    }
}

/// A section with its heading.
fn section(title: &str, body: &Markup) -> Markup {
    html! {
        section { h2 { (title) } (body) }
    }
}

/// With a minus sign where a hyphen stands for one.
fn minus(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut before = ' ';
    let mut chars = text.chars().peekable();
    while let Some(char) = chars.next() {
        let is_minus = char == '-' && !before.is_alphanumeric() && chars.peek().is_some_and(char::is_ascii_digit);
        out.push(if is_minus { '−' } else { char });
        before = char;
    }
    out
}

/// RFC 3339 in UTC, to the second.
fn moment(text: &str) -> String {
    text.get(..19)
        .map_or(text.to_owned(), |seconds| seconds.replace('T', " ") + " UTC")
}

/// Along an axis of gains and losses.
fn plus_minus(value: f64) -> String {
    if value.abs() < 1e-9 {
        "0".to_owned()
    } else {
        minus(&format!("{value:+.2}"))
    }
}

/// A table of names and values.
fn facts(rows: &[(&str, String)]) -> Markup {
    html! {
        table .facts {
            @for (name, value) in rows {
                tr { th { (name) } td { (minus(value)) } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::report::{sample, tests};

    /// Every element that was opened is closed in its turn.
    fn assert_well_formed(page: &str) {
        const VOID: [&str; 2] = ["meta", "br"];
        let mut open = Vec::new();
        let body = page.trim_start_matches("<!DOCTYPE html>");
        for part in body.split('<').skip(1) {
            let (tag, _) = part
                .split_once('>')
                .unwrap_or_else(|| panic!("a tag without an end: {part}"));
            let name = tag.split_whitespace().next().unwrap_or_default();
            if let Some(name) = name.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name), "closed out of turn");
            } else if !VOID.contains(&name) {
                open.push(name);
            }
        }
        assert!(open.is_empty(), "never closed: {open:?}");
    }

    const SECTIONS: [&str; 8] = [
        "Where that is on the scale",
        "Both arms over time",
        "The learning arm by version",
        "Before and after",
        "The policy while it learns",
        "The loop",
        "The ledger",
        "The run",
    ];

    #[test]
    fn the_page_has_every_section_and_needs_nothing_from_elsewhere() {
        let page = sample::report().page();
        assert_well_formed(&page);
        for section in SECTIONS {
            assert!(page.contains(&format!("<h2>{section}</h2>")), "{section}");
        }
        for foreign in ["http://", "https://", "<script", "<link", "@import", "url(", "src="] {
            assert!(!page.contains(foreign), "{foreign}");
        }
        assert!(!page.contains("NaN"));
    }

    #[test]
    fn a_run_in_which_nothing_happened_has_a_page_too() {
        let mut report = tests::report();
        (report.arms, report.settled, report.ledger.balanced) = (std::collections::BTreeMap::new(), false, false);
        let page = report.page();
        assert_well_formed(&page);
        for section in SECTIONS {
            assert!(page.contains(&format!("<h2>{section}</h2>")), "{section}");
        }
        assert!(page.contains("The scale was not measured in this run."));
        assert!(page.contains("The ledger does not add up.") && page.contains("still on their way"));
        assert!(!page.contains("NaN") && !page.contains("inf"));
    }

    #[test]
    fn code_in_the_examples_is_text_and_nothing_else() {
        let mut report = sample::report();
        if let Some(headroom) = &mut report.headroom {
            headroom.examples[0].context = "let x = Vec::<u8>::new(); // </pre><script>alert(1)</script>".to_owned();
            headroom.examples[0].file = "<b>.rs".to_owned();
        }
        let page = report.page();
        assert_well_formed(&page);
        assert!(page.contains("Vec::&lt;u8&gt;::new(); // &lt;/pre&gt;&lt;script&gt;"));
        assert!(!page.contains("<script") && !page.contains("<b>.rs"));
    }

    #[test]
    fn a_minus_is_a_minus_and_a_hyphen_a_hyphen() {
        assert_eq!(minus("-0.3 (95% -0.5 … +0.1)"), "−0.3 (95% −0.5 … +0.1)");
        assert_eq!(minus("2026-11-21 in-flight 1e-6"), "2026-11-21 in-flight 1e-6");
    }

    #[test]
    #[ignore = "writes a file to look at"]
    fn sample_page() {
        let path = std::env::temp_dir().join("springtide-sample.html");
        std::fs::write(&path, sample::report().page()).unwrap();
        println!("{}", path.display());
    }
}
