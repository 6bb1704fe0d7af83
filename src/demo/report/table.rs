//! The report as a table of plain text, for the terminal.

use std::{collections::BTreeMap, fmt::Write};

use super::Report;
use crate::demo::{
    number::{interval, or_dash, percent, range, signed},
    tally::{FROZEN, Figures, LEARNING},
};

impl Report {
    /// The report for people. Ends with a newline.
    pub fn table(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = self.write_table(&mut text);
        text
    }

    fn write_table(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "{:<20} {:>8} {:>8} {:>8} {:>20} {:>8} {:>8} {:>8}",
            "", "users", "pauses", "reward", "95%", "accepts", "of shown", "shown"
        )?;
        for name in [LEARNING, FROZEN] {
            write_arm(out, "whole run", name, &self.arms)?;
        }
        for (third, label) in self.thirds.iter().zip(["1st third", "2nd third", "3rd third"]) {
            for name in [LEARNING, FROZEN] {
                write_arm(out, label, name, &third.arms)?;
            }
        }
        writeln!(
            out,
            "\naccepts: per 100 pauses; reward: accept {:+.2}, reject {:+.2}, decline 0; {} unanswered left out",
            1.0 - self.parameters.tau,
            -self.parameters.tau,
            self.arms.values().map(|arm| arm.unanswered).sum::<u64>()
        )?;
        writeln!(
            out,
            "{LEARNING} − {FROZEN}: reward {}, accepts per 100 {}",
            interval(self.difference, 3),
            interval(self.difference_accepts_per_100, 1)
        )?;
        writeln!(
            out,
            "feedback to serving: p50 {} s, p95 {} s (n {}); {} steps, {} versions answered, roots {}",
            or_dash(self.feedback_to_serving_seconds.p50, 1),
            or_dash(self.feedback_to_serving_seconds.p95, 1),
            self.feedback_to_serving_seconds.n,
            self.steps,
            self.versions_served.len(),
            if self.roots_agree { "agree" } else { "DISAGREE" },
        )?;
        if !self.feedback_to_serving_phases.is_empty() {
            let phases = self.feedback_to_serving_phases.iter();
            let parts: Vec<String> = phases
                .map(|p| format!("{} {:.1} ({:.1})", p.name, p.p50, p.p95))
                .collect();
            writeln!(out, "  of which p50 (p95) s: {}", parts.join(", "))?;
        }
        writeln!(
            out,
            "swap pause: p50 {} ms, max {} ms; delta {} of a version; parity max |Δ log p| {}",
            or_dash(self.swap_pause_ms.p50, 3),
            or_dash(self.swap_pause_ms.max, 3),
            percent(self.delta_ratio, 2),
            self.parity_log_prob_difference_max
                .map_or("–".to_owned(), |parity| format!("{parity:.1e}")),
        )?;
        let ledger = &self.ledger;
        writeln!(
            out,
            "ledger: {} generations = {} trained + {} held out + {} censored + {} dropped + {} queued + {} open + {} erased: {}",
            ledger.generations,
            ledger.trained,
            ledger.held_out,
            ledger.censored,
            ledger.dropped,
            ledger.queued,
            ledger.open,
            ledger.erased,
            if ledger.balanced { "balanced" } else { "NOT BALANCED" },
        )?;
        for (reason, generations) in &ledger.reasons {
            writeln!(out, "  {reason} {generations}")?;
        }
        writeln!(
            out,
            "lost to staleness 0: {} of {LEARNING}'s {} generations ({}), sampled during a cohort's last horizons, its step and the swap",
            self.staleness.dropped,
            self.staleness.generations,
            percent(self.staleness.share, 1),
        )?;
        for alarm in &self.alarms {
            writeln!(out, "{}", alarm.told())?;
        }
        let counts = &self.counts;
        writeln!(
            out,
            "pauses: {} due, {} shed, {} failed, {} prompts shortened, {} answers acknowledged after {} retries",
            counts.due,
            counts.shed,
            counts.failed,
            counts.prompts_shortened,
            counts.feedback_acknowledged,
            counts.feedback_retries
        )?;
        for (error, n) in &counts.errors {
            writeln!(out, "  {error} {n}")?;
        }
        if self.interrupted {
            writeln!(out, "ended by hand after {:.0} s", self.seconds)?;
        }
        if !self.settled {
            writeln!(
                out,
                "not settled: some generations were still on their way when the figures were taken"
            )?;
        }
        Ok(())
    }
}

fn write_arm(out: &mut String, label: &str, name: &str, arms: &BTreeMap<String, Figures>) -> std::fmt::Result {
    let Some(arm) = arms.get(name) else {
        return Ok(());
    };
    writeln!(
        out,
        "{label:<10} {name:<9} {:>8} {:>8} {:>8} {:>20} {:>8} {:>8} {:>8}",
        arm.users,
        arm.pauses,
        signed(arm.reward_mean, 3),
        range(arm.reward_ci95, 3),
        or_dash(arm.accepts_per_100, 1),
        or_dash(arm.accept_rate, 3),
        or_dash(arm.show_rate, 3),
    )
}

#[cfg(test)]
mod tests {
    use crate::demo::report::tests::report;

    #[test]
    fn the_table_says_what_was_left_out_and_whether_the_ledger_balances() {
        let mut report = report();
        let table = report.table();
        assert!(
            table.contains("reward: accept +0.75, reject -0.25, decline 0; 1 unanswered left out"),
            "{table}"
        );
        assert!(
            table
                .contains("= 2 trained + 0 held out + 1 censored + 0 dropped + 0 queued + 0 open + 0 erased: balanced")
        );
        assert!(!table.contains("not settled"));
        (report.settled, report.ledger.balanced) = (false, false);
        assert!(report.table().contains("NOT BALANCED") && report.table().contains("not settled"));
    }
}
