//! The result as plain text, for the terminal. The page has the rest.

use std::fmt::Write;

use report::number::{decimal, interval, percent, range, signed};

use super::RunReport;
use crate::stats::{Arms, FOLLOWING, FROZEN, LEARNING};

impl RunReport {
    /// Ends with a newline.
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
        write_arms(out, "whole run", &self.arms)?;
        for (third, label) in self.thirds.iter().zip(["1st third", "2nd third", "3rd third"]) {
            write_arms(out, label, &third.arms)?;
        }
        let (accept, reject) = (1.0 - self.parameters.tau, -self.parameters.tau);
        writeln!(
            out,
            "\naccepts: per 100 pauses; reward: accept {}, reject {}, decline 0; intervals are by user",
            signed(Some(accept), 2),
            signed(Some(reject), 2),
        )?;
        let following = (self.following_difference, self.following_difference_accepts_per_100);
        for (arm, (reward, accepts)) in [
            (LEARNING, (self.difference, self.difference_accepts_per_100)),
            (FOLLOWING, following),
        ] {
            writeln!(
                out,
                "{arm} − {FROZEN}: reward {}, accepts per 100 {}",
                interval(reward, 3),
                interval(accepts, 1)
            )?;
        }
        writeln!(out, "{}", self.facts)?;
        writeln!(out, "\nWhat was not reached:")?;
        for point in self.not_reached() {
            writeln!(out, "- {point}")?;
        }
        Ok(())
    }
}

fn write_arms(out: &mut String, label: &str, arms: &Arms) -> std::fmt::Result {
    for name in [LEARNING, FOLLOWING, FROZEN] {
        let Some(arm) = arms.get(name) else { continue };
        writeln!(
            out,
            "{label:<10} {name:<9} {:>8} {:>8} {:>8} {:>20} {:>8} {:>8} {:>8}",
            arm.users,
            arm.pauses,
            signed(arm.reward_mean, 3),
            range(arm.reward_ci95, 3),
            decimal(arm.accepts_per_100, 1),
            percent(arm.accept_rate, 0),
            percent(arm.show_rate, 0),
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::results::sample;

    #[test]
    fn the_table_says_whether_the_ledger_balances_and_what_was_not_reached() {
        let mut report = sample::report();
        let table = report.table();
        assert!(
            table.contains("learner − base: reward +") && table.contains("champion − base: reward +"),
            "{table}"
        );
        assert!(
            table.contains("reward: accept +0.75, reject −0.25, decline 0"),
            "{table}"
        );
        assert!(table.contains(" + 20 queued + 0 open + 0 erased: balanced"), "{table}");
        assert!(!table.contains("no final disposition"), "{table}");
        (report.facts.settled, report.facts.ledger.balanced) = (false, false);
        let table = report.table();
        assert!(table.contains("NOT BALANCED") && table.contains("- Some generations had no final disposition"));
    }
}
