//! What became of every generation, and the parameters of the run.

use maud::{Markup, html};
use report::{
    number::percent,
    page::{name_value_table, section},
};

use crate::results::RunReport;

impl RunReport {
    pub fn ledger_section(&self) -> Markup {
        let ledger = &self.facts.ledger;
        let counts = &ledger.counts;
        let rows = [
            ("trained", counts.trained, "a step learned from it"),
            (
                "held out",
                counts.held_out,
                "sampled by another arm, kept to compare with",
            ),
            ("censored", counts.censored, "no answer by the horizon"),
            ("dropped", counts.dropped, "will never be trained on"),
            ("queued", counts.queued, "scored, waiting for a full cohort"),
            ("open", counts.open, "its horizon has not passed"),
            ("erased", counts.erased, ""),
        ];
        let share = |n: i64| {
            let total = counts.generations;
            percent((total > 0).then(|| n as f64 / total as f64), 1)
        };
        section(
            "The ledger",
            &html! {
                p { "What became of every generation of the run. Every generation has exactly one disposition." }
                div .card { table .numbers.ledger {
                    thead { tr { th { "disposition" } th { "generations" } th { "share" } th { "" } } }
                    tbody { @for (name, n, meaning) in rows {
                        tr { th { (name) } td { (n) } td { (share(n)) } td { (meaning) } }
                        @for (reason, n) in self.reasons(name) {
                            tr .part { th { (reason) } td { (n) } td { (share(n)) } td { "" } }
                        }
                    } }
                    tfoot { tr {
                        th { "all generations" } td { (counts.generations) } td { (share(counts.generations)) }
                        td { (if ledger.balanced { "adds up" } else { "DOES NOT ADD UP" }) ", " (counts.missing) " missing" }
                    } }
                } }
            },
        )
    }

    /// The reasons of a disposition, without its name.
    fn reasons(&self, disposition: &str) -> Vec<(&str, i64)> {
        let reasons = self.facts.ledger.reasons.iter();
        let of = reasons.filter_map(|(reason, n)| Some((reason.strip_prefix(disposition)?.strip_prefix(": ")?, *n)));
        of.collect()
    }

    pub fn run_section(&self) -> Markup {
        let (p, counts) = (&self.parameters.setup, &self.facts.counts);
        let corpus = p.corpus.as_ref().map(|dir| dir.display().to_string());
        let corpus = corpus.unwrap_or_else(|| "the crates that this build fetched".to_owned());
        let answers = if p.control {
            "permuted: there was nothing to learn"
        } else {
            "the developers' own"
        };
        section(
            "The run",
            &html! {
                div .grid {
                    div .card { (name_value_table(&[
                        ("policy", p.policy.clone()),
                        ("seed", p.seed.to_string()),
                        ("length", format!("{} min planned, {:.0} s replayed", p.minutes, self.facts.seconds)),
                        ("pauses", format!("{} a second, mean over all users", p.rate)),
                        ("users", format!("{}, {} developers", p.users, p.developers)),
                        ("temperature", p.temperature.to_string()),
                        ("answers", answers.to_owned()),
                        ("code", format!("{} files of {corpus}", p.files)),
                        ("price of showing, τ", self.parameters.tau.to_string()),
                        ("horizon", format!("{} s", p.horizon_seconds)),
                        ("pauses whose developer never answers", percent(Some(self.parameters.silent_share), 0)),
                        ("delay of answers", format!("lognormal, median {} s, σ {}", self.parameters.delay_median_seconds, self.parameters.delay_sigma)),
                        ("completions in flight, at most", self.parameters.completions_in_flight_max.to_string()),
                    ])) }
                    div .card {
                        (name_value_table(&[
                            ("pauses due", counts.due.to_string()),
                            ("shed: too many in flight", counts.shed.to_string()),
                            ("failed", counts.failed.to_string()),
                            ("prompts shortened", counts.prompts_shortened.to_string()),
                            ("answers acknowledged", format!("{} after {} retries", counts.feedback_acknowledged, counts.feedback_retries)),
                            ("longest delay of the replay", format!("{} ms", counts.arrival_lateness_ms_max)),
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
