//! What became of every generation, and what kind of run it was.

use maud::{Markup, html};

use super::{facts, section};
use crate::demo::{number::percent, report::Report};

impl Report {
    pub fn ledger_section(&self) -> Markup {
        let ledger = &self.ledger;
        let rows = [
            ("trained", ledger.trained, "a step learnt from it"),
            ("held out", ledger.held_out, "another arm, kept to compare with"),
            ("censored", ledger.censored, "the horizon passed without an answer"),
            ("dropped", ledger.dropped, "never to be trained on"),
            ("queued", ledger.queued, "scored, waiting for a whole cohort"),
            ("open", ledger.open, "its horizon has not passed"),
            ("erased", ledger.erased, ""),
        ];
        let share = |n: i64| {
            percent(
                (ledger.generations > 0).then(|| n as f64 / ledger.generations as f64),
                1,
            )
        };
        section(
            "The ledger",
            &html! {
                div .card { table .numbers.ledger {
                    thead { tr { th { "disposition" } th { "generations" } th { "share" } th { "" } } }
                    tbody { @for (name, n, meaning) in rows {
                        tr { th { (name) } td { (n) } td { (share(n)) } td { (meaning) } }
                        @for (reason, n) in self.reasons(name) {
                            tr .part { th { (reason) } td { (n) } td { (share(n)) } td { "" } }
                        }
                    } }
                    tfoot { tr {
                        th { "all generations" } td { (ledger.generations) } td { (share(ledger.generations)) }
                        td { (if ledger.balanced { "adds up" } else { "DOES NOT ADD UP" }) ", " (ledger.missing) " missing" }
                    } }
                } }
            },
        )
    }

    /// Reasons of a disposition, without its name.
    fn reasons(&self, disposition: &str) -> Vec<(&str, i64)> {
        let reasons = self.ledger.reasons.iter();
        let of = reasons.filter_map(|(reason, n)| Some((reason.strip_prefix(disposition)?.strip_prefix(": ")?, *n)));
        of.collect()
    }

    pub fn run_section(&self) -> Markup {
        let (p, counts) = (&self.parameters, &self.counts);
        let corpus = p
            .corpus
            .as_ref()
            .map_or("the crates that this build fetched".to_owned(), |dir| {
                dir.display().to_string()
            });
        section(
            "The run",
            &html! {
                div .grid {
                    div .card { (facts(&[
                        ("policy", p.policy.clone()),
                        ("seed", p.seed.to_string()),
                        ("length", format!("{} min asked, {:.0} s replayed", p.minutes, self.seconds)),
                        ("pauses", format!("{} a second, mean over all users", p.rate)),
                        ("users", format!("{}, {} developers", p.users, p.developers)),
                        ("temperature", p.temperature.to_string()),
                        ("answers", if p.control { "permuted: there was nothing to learn" } else { "the developers' own" }.to_owned()),
                        ("code", format!("{} files of {corpus}", p.files)),
                        ("price of showing, τ", p.tau.to_string()),
                        ("horizon", format!("{} s", p.horizon_seconds)),
                        ("developers who never answer", percent(Some(p.silent_share), 0)),
                        ("delay of answers", format!("lognormal, median {} s, σ {}", p.delay_median_seconds, p.delay_sigma)),
                        ("completions in flight, at most", p.completions_in_flight_max.to_string()),
                    ])) }
                    div .card {
                        (facts(&[
                            ("pauses due", counts.due.to_string()),
                            ("shed", counts.shed.to_string()),
                            ("failed", counts.failed.to_string()),
                            ("prompts shortened", counts.prompts_shortened.to_string()),
                            ("answers acknowledged", format!("{} after {} retries", counts.feedback_acknowledged, counts.feedback_retries)),
                            ("latest arrival", format!("{} ms late", counts.arrival_lateness_ms_max)),
                        ]))
                        @if !counts.errors.is_empty() {
                            table .facts { @for (error, n) in &counts.errors { tr { th { (error) } td { (n) } } } }
                        }
                    }
                }
            },
        )
    }
}
