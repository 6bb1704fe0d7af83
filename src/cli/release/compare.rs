//! `springtide release compare`: whether users are worse served than before.

use std::time::Duration;

use control::Shown;
use control::api::rewards::Rewards;
use control::times::age;

use crate::cli::control_client::ControlClient;
use crate::cli::output::{Output, table};

/// As in `GET /v1/rewards`.
const PERIODS_MAX: u64 = 100;
/// Comparisons that there is a verdict about.
const VERDICT_MAX: usize = 4;

#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Alias that answered. Default: champion; with --versions all.
    #[arg(long)]
    arm: Option<String>,
    /// Instead: the newest answers of these versions, compared with the first.
    #[arg(long, value_delimiter = ',', value_name = "SERIALS", conflicts_with_all = ["ago", "since", "period"])]
    versions: Vec<i64>,
    /// Answers on this surface only.
    #[arg(long)]
    surface: Option<String>,
    /// Length of each period.
    #[arg(long, default_value = "15m", value_parser = age)]
    period: Duration,
    /// How long ago the periods ended that the last one is compared with.
    #[arg(long, default_value = "1h,1d,7d", value_parser = age, value_delimiter = ',', value_name = "AGES")]
    ago: Vec<Duration>,
    /// Instead: every period from so long ago until now.
    #[arg(long, value_parser = age, value_name = "AGE", conflicts_with = "ago")]
    since: Option<Duration>,
    #[command(flatten)]
    output: Output,
}

impl Args {
    pub async fn run(self, client: &ControlClient) -> anyhow::Result<()> {
        let mut query: Vec<(&str, String)> = Vec::new();
        query.extend(self.arm.clone().map(|arm| ("arm", arm)));
        query.extend(self.surface.clone().map(|surface| ("surface", surface)));
        match self.versions.is_empty() {
            true => query.extend(self.periods()?),
            false => {
                let serials: Vec<String> = self.versions.iter().map(i64::to_string).collect();
                query.push(("versions", serials.join(",")));
            }
        }
        let query: Vec<(&str, &str)> = query.iter().map(|(name, value)| (*name, &**value)).collect();
        let rewards: Rewards = client.get("/v1/rewards", &query).await?;
        self.output.print(&rewards, || text(&rewards))
    }

    fn periods(&self) -> anyhow::Result<[(&'static str, String); 2]> {
        let period = self.period.as_secs();
        anyhow::ensure!(period > 0, "--period must be at least 1s");
        let ages: Vec<u64> = match self.since {
            Some(since) => {
                let count = since.as_secs().div_ceil(period).max(1);
                anyhow::ensure!(
                    count <= PERIODS_MAX,
                    "--since has {count} periods of --period; at most {PERIODS_MAX} can be read together: make --period longer"
                );
                (0..count).map(|number| number * period).collect()
            }
            None => [0].into_iter().chain(self.ago.iter().map(Duration::as_secs)).collect(),
        };
        let ages: Vec<String> = ages.iter().map(u64::to_string).collect();
        Ok([("period", period.to_string()), ("ago", ages.join(","))])
    }
}

fn text(rewards: &Rewards) -> String {
    let by_time = rewards.period.is_some();
    let head = [
        if by_time { "ended" } else { "" },
        "versions",
        ">answers",
        ">users",
        ">scored",
        ">declined",
        ">failed",
        ">reward",
        "95%",
        if by_time { ">now less that" } else { ">first less that" },
        "95%",
    ];
    let arm = rewards.arm.as_deref().unwrap_or("all arms");
    let mut text = match rewards.period {
        Some(period) => format!("{arm}, in periods of {}\n", ago(period)),
        None => format!("{arm}, the newest answers of each version\n"),
    };
    text += &table(head, rewards.periods.iter().map(row));
    text += "\nwhat the newest of these answers are like\n";
    let mut figures_head = FIGURES;
    figures_head[0] = head[0];
    text += &table(figures_head, rewards.periods.iter().map(figures));
    if by_time {
        text += &format!("\n{}", verdict(&rewards.periods));
    }
    text
}

/// All but `shown` are of answers that were shown.
const FIGURES: [&str; 13] = [
    "ended",
    "versions",
    ">read",
    ">shown",
    ">accepted",
    ">edited",
    ">unanswered",
    ">unscored",
    ">disagree",
    ">tool failed",
    ">tokens",
    ">repeated",
    ">entropy",
];

fn figures(period: &Shown) -> [String; 13] {
    let Some(figures) = period.figures else {
        let mut cells = [const { String::new() }; 13];
        (cells[0], cells[1]) = (when(period), versions(period));
        return cells;
    };
    let share = |share: Option<f64>| share.map_or(String::new(), |share| format!("{:.1}%", 100.0 * share));
    let decimals =
        |value: Option<f64>, decimals: usize| value.map_or(String::new(), |value| format!("{value:.decimals$}"));
    [
        when(period),
        versions(period),
        figures.answers.to_string(),
        share(figures.shown),
        share(figures.accepted),
        share(figures.edited),
        share(figures.unanswered),
        share(figures.unscored),
        share(figures.disagreement),
        share(figures.tool_failed),
        decimals(figures.length, 1),
        share(figures.repetition),
        decimals(figures.entropy, 2),
    ]
}

fn versions(period: &Shown) -> String {
    match (period.first_version, period.last_version) {
        (Some(first), Some(last)) if first != last => format!("{first}–{last}"),
        (Some(first), _) => first.to_string(),
        _ => String::new(),
    }
}

fn row(period: &Shown) -> [String; 11] {
    let share = |count: f64, of: i64| match of > 0 {
        true => format!("{:.0}%", count / of as f64 * 100.0),
        false => String::new(),
    };
    let failed = period.aborted + period.not_begun;
    [
        when(period),
        versions(period),
        period.answers.to_string(),
        period.users.to_string(),
        share(period.scored as f64, period.answers),
        share(period.declined as f64, period.answers),
        share(failed as f64, period.answers + period.not_begun),
        number(period.reward),
        interval(period.interval),
        number(period.difference.map(|difference| difference.mean)),
        interval(period.difference.map(|difference| difference.ci95)),
    ]
}

fn when(period: &Shown) -> String {
    match period.ago {
        None => String::new(),
        Some(0) => "now".to_owned(),
        Some(seconds) => format!("{} ago", ago(seconds)),
    }
}

fn ago(seconds: i64) -> String {
    humantime::format_duration(Duration::from_secs(seconds.unsigned_abs())).to_string()
}

fn number(value: Option<f64>) -> String {
    value.map_or(String::new(), |value| format!("{value:+.3}"))
}

fn interval(ends: Option<[f64; 2]>) -> String {
    ends.map_or(String::new(), |[low, high]| format!("[{low:+.3}, {high:+.3}]"))
}

/// One sentence.
fn verdict(periods: &[Shown]) -> String {
    let compared: Vec<&Shown> = periods.iter().filter(|period| period.difference.is_some()).collect();
    let worse = compared.iter().filter(|period| period.first_is_worse);
    let worse: Vec<String> = worse.map(|period| when(period)).collect();
    match (compared.len(), worse.is_empty()) {
        (0, _) => "There is nothing to compare with: give other ages with --ago.".to_owned(),
        // of many comparisons some look worse by chance
        (count, _) if count > VERDICT_MAX => String::new(),
        (_, true) => "Now does not look worse than any of them.".to_owned(),
        (_, false) => format!("Now looks worse than {}.", worse.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn period(ago: u64, versions: [i64; 2], difference: &Value) -> Value {
        json!({
            "ago": ago, "first_version": versions[0], "last_version": versions[1], "answers": 200, "declined": 50,
            "aborted": 2, "not_begun": 0, "scored": 180, "users": 40, "reward": 0.0512, "interval": [0.01, 0.09],
            "difference": difference,
            "first_is_worse": difference["ci95"][1].as_f64().is_some_and(|high| high < 0.0),
            "figures": {"answers": 200, "shown": 0.75, "accepted": 0.312, "edited": 0.04, "unanswered": 0.2, "unscored": 0.1,
                "disagreement": 0.01, "tool_failed": 0.0, "length": 181.26, "repetition": 0.021, "entropy": 0.42},
        })
    }

    fn text(rewards: Value) -> String {
        super::text(&serde_json::from_value(rewards).unwrap())
    }

    fn verdict(periods: Value) -> String {
        super::verdict(&serde_json::from_value::<Vec<Shown>>(periods).unwrap())
    }

    #[test]
    fn now_stands_beside_what_was() {
        let worse = json!({"mean": -0.1, "ci95": [-0.15, -0.05]});
        let same = json!({"mean": 0.01, "ci95": [-0.02, 0.04]});
        let empty = json!({"ago": 604_800, "first_version": null, "last_version": null, "answers": 0, "declined": 0,
            "aborted": 0, "not_begun": 0, "scored": 0, "users": 0, "reward": null, "interval": null, "difference": null,
            "first_is_worse": false});
        let periods = json!([
            period(0, [41, 43], &Value::Null),
            period(3_600, [40, 40], &same),
            period(86_400, [7, 9], &worse),
            empty,
        ]);
        let text = text(json!({"arm": "champion", "period": 900, "periods": periods}));
        for part in [
            "champion, in periods of 15m",
            "41–43",
            "1h ago",
            "25%",
            "+0.051",
            "[-0.150, -0.050]",
            "Now looks worse than 1day ago.",
            "90%",
            "31.2%",
            "181.3",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("null") && !text.contains("NaN"), "{text}");
    }

    #[test]
    fn versions_stand_beside_each_other_without_a_verdict() {
        let mut periods = json!([period(0, [41, 41], &Value::Null), period(0, [43, 43], &Value::Null)]);
        for period in periods.as_array_mut().unwrap() {
            period["ago"] = Value::Null;
        }
        let text = text(json!({"arm": null, "period": null, "periods": periods}));
        assert!(
            text.starts_with("all arms, the newest answers of each version"),
            "{text}"
        );
        for part in ["41", "43", "first less that", "31.2%"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(
            !text.contains("null") && !text.contains("now") && !text.contains("worse"),
            "{text}"
        );
    }

    #[test]
    fn without_anything_before_it_says_so() {
        let one = json!([period(0, [1, 1], &Value::Null)]);
        assert!(verdict(one.clone()).contains("nothing to compare"));
        let same = period(60, [1, 1], &json!({"mean": 0.0, "ci95": [-0.1, 0.1]}));
        assert!(verdict(json!([one[0], same])).contains("does not look worse"));
    }
}
