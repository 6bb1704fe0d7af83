//! The report as one HTML page. It contains no prompt text.

mod arms;
mod ledger;
mod references;
mod training;

use maud::{Markup, html};
use report::{
    number::{decimal, interval, percent, signed},
    page::{self, Tile, section},
};

use super::{RunReport, conclusion::Tone};
use crate::stats::{FOLLOWING, FROZEN, LEARNING};

/// Styles of this report only.
const STYLE: &str = include_str!("style.css");

impl RunReport {
    /// The whole page.
    pub fn page(&self) -> String {
        let body = html! {
            (self.top())
            (self.not_reached_section())
            (self.references_section())
            (self.over_time_section())
            (self.policy_section())
            (self.loop_section())
            (self.ledger_section())
            (self.run_section())
        };
        page::document(&format!("Springtide: {}", self.conclusion().title), STYLE, &body)
    }

    fn top(&self) -> Markup {
        let conclusion = self.conclusion();
        let tone = match conclusion.tone {
            Tone::Good => "good",
            Tone::Open => "open",
            Tone::Bad => "bad",
        };
        let p = &self.parameters;
        let seconds = self
            .facts
            .started_at
            .get(..19)
            .unwrap_or(&self.facts.started_at)
            .replace('T', " ");
        let (accept, reject) = (signed(Some(1.0 - p.tau), 2), signed(Some(-p.tau), 2));
        html! {
            header class=(tone) {
                p .kicker {
                    "Springtide · policy " (p.setup.policy) " · " (seconds) " UTC · "
                    (decimal(Some(self.facts.seconds / 60.0), 1)) " min · seed " (p.setup.seed)
                }
                h1 { (conclusion.title) "." }
                @for sentence in self.sentences() { p .lead { (sentence) } }
                (self.tiles())
                p .legend {
                    span .primary { "learning arm (" (LEARNING) ")" }
                    span .second { "following arm (" (FOLLOWING) ")" }
                    span .baseline { "frozen arm (" (FROZEN) ")" }
                    " Bands and whiskers are 95% intervals, clustered by user."
                }
            }
            (section("What you are looking at", &html! {
                p {
                    "Simulated developers worked on real code. At each pause they asked the running policy to complete the \
                     line. A suggestion counts as right if it is exactly what the developer typed next. The developer then \
                     accepted or rejected it, and a fifth of the time gave no answer."
                }
                p {
                    "Users were assigned to an arm by a hash of their name. The learning arm was trained on these answers \
                     while the run went on, and in a few of its requests it must not decline. The following arm served the \
                     versions that the learning arm made. The frozen arm always served the first version. A pause earns " (accept)
                    " for an accepted suggestion, " (reject) " for a rejected one, and 0 if the policy declined to suggest \
                     anything. So a policy can earn more by being right more often, or by showing fewer wrong suggestions. \
                     Pauses whose developer gives no answer are left out of all arms."
                }
            }))
        }
    }

    fn tiles(&self) -> Markup {
        let [learning, following, frozen] = self.all_arms();
        let waits = &self.facts.feedback_to_serving_seconds;
        let against = |followed: String, frozen: String| format!("{FOLLOWING} {followed}, {FROZEN} {frozen}");
        let difference = |of, digits| format!("difference {}", interval(of, digits));
        page::render_tiles(&[
            Tile {
                label: "reward per pause",
                value: signed(learning.reward_mean, 3),
                notes: vec![
                    against(signed(following.reward_mean, 3), signed(frozen.reward_mean, 3)),
                    difference(self.difference, 3),
                ],
            },
            Tile {
                label: "accepts per 100 pauses",
                value: decimal(learning.accepts_per_100, 1),
                notes: vec![
                    against(
                        decimal(following.accepts_per_100, 1),
                        decimal(frozen.accepts_per_100, 1),
                    ),
                    difference(self.difference_accepts_per_100, 1),
                ],
            },
            Tile {
                label: "pauses with a suggestion",
                value: percent(learning.show_rate, 0),
                notes: vec![against(percent(following.show_rate, 0), percent(frozen.show_rate, 0))],
            },
            Tile {
                label: "from an answer to a version that learned from it",
                value: format!("{} s", decimal(waits.p50, 1)),
                notes: vec![
                    format!("median; 95% within {} s", decimal(waits.p95, 1)),
                    format!(
                        "{} steps, {} versions",
                        self.facts.totals.steps,
                        self.versions_served.len()
                    ),
                ],
            },
        ])
    }

    fn not_reached_section(&self) -> Markup {
        section(
            "What was not reached",
            &html! { ul { @for point in self.not_reached() { li { (point) } } } },
        )
    }
}

#[cfg(test)]
mod tests {
    use crate::results::sample;

    /// Every element that is opened is closed in order.
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
                assert_eq!(open.pop(), Some(name), "closed out of order");
            } else if !VOID.contains(&name) {
                open.push(name);
            }
        }
        assert!(open.is_empty(), "never closed: {open:?}");
    }

    const SECTIONS: [&str; 8] = [
        "What you are looking at",
        "What was not reached",
        "Against other ways of serving the base",
        "The arms over time",
        "The policy while it learns",
        "The loop",
        "The ledger",
        "The run",
    ];

    fn assert_is_whole(page: &str) {
        assert_well_formed(page);
        for section in SECTIONS {
            assert!(page.contains(&format!("<h2>{section}</h2>")), "{section}");
        }
        assert!(!page.contains("NaN") && !page.contains(">inf"), "{page}");
    }

    #[test]
    fn the_page_has_every_section_and_needs_no_other_file() {
        let page = sample::report().page();
        assert_is_whole(&page);
        for foreign in ["http://", "https://", "<script", "<link", "@import", "url(", "src="] {
            assert!(!page.contains(foreign), "{foreign}");
        }
    }

    #[test]
    fn a_run_in_which_nothing_happened_has_a_page_too() {
        let mut report = sample::empty();
        (report.facts.settled, report.facts.ledger.balanced) = (false, false);
        let page = report.page();
        assert_is_whole(&page);
        assert!(page.contains("Reference policies were not measured in this run."));
        assert!(page.contains("The ledger does not add up.") && page.contains("had no final disposition"));
    }

    #[test]
    #[ignore = "writes a file to look at"]
    fn sample_page() {
        let path = std::env::temp_dir().join("springtide-sample.html");
        std::fs::write(&path, sample::report().page()).unwrap();
        println!("{}", path.display());
    }
}
