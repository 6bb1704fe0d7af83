//! `springtide release arms`: how users are divided among aliases.

use anyhow::{Context, bail, ensure};
use control::times::rfc3339;
use release::ArmOptions;
use release::answers::ExperimentView;
use serde_json::json;
use uuid::Uuid;

use crate::cli::control_client::ControlClient;
use crate::cli::output::{Output, table};

const PATH: &str = "/v1/experiment";

#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// All arms with their shares of the users, such as learner=0.2,champion=0.7,base=0.1. An arm
    /// that is not named gets no users any more.
    #[arg(long, value_name = "ALIAS=SHARE,…", value_delimiter = ',', value_parser = pair)]
    set: Vec<(String, f64)>,
    /// The share of an arm's requests that must not decline, such as learner=0.02. Arms that are not
    /// named keep theirs.
    #[arg(long, value_name = "ALIAS=SHARE,…", value_delimiter = ',', value_parser = pair)]
    explore: Vec<(String, f64)>,
    /// The highest temperature that users' requests of an arm are sampled at, such as champion=0.3;
    /// champion=none takes the bound away. Arms that are not named keep theirs.
    #[arg(long, value_name = "ALIAS=TEMPERATURE,…", value_delimiter = ',', value_parser = bound)]
    temperature_max: Vec<(String, Option<f64>)>,
    /// The lowest probability of a text that users of an arm are shown, such as champion=0.25; of a less
    /// probable one they are told that the policy declined. champion=none takes the bar away. Arms that
    /// are not named keep theirs.
    #[arg(long, value_name = "ALIAS=PROBABILITY,…", value_delimiter = ',', value_parser = bound)]
    probability_min: Vec<(String, Option<f64>)>,
    /// Draw every user's arm anew. Without it, a user changes arms only if the shares move past them.
    #[arg(long)]
    new_salt: bool,
    /// Why; kept for audits. A change needs it.
    #[arg(long)]
    reason: Option<String>,
    #[command(flatten)]
    output: Output,
}

impl Args {
    pub async fn run(self, client: &ControlClient) -> anyhow::Result<()> {
        let current: ExperimentView = client.get(PATH, &[]).await?;
        let has_bounds = !self.temperature_max.is_empty() || !self.probability_min.is_empty();
        if self.set.is_empty() && self.explore.is_empty() && !has_bounds && !self.new_salt {
            ensure!(
                self.reason.is_none(),
                "--reason belongs to a change: add --set, --explore, --temperature-max, --probability-min or --new-salt"
            );
            return self.output.print(&current, || page(&current));
        }
        let reason = self.reason.context("a change of the arms needs --reason '…'")?;
        let arms: Vec<ArmOptions> = current.arms.into_iter().map(ArmOptions::from).collect();
        let mut body = json!({
            "arms": changed(&arms, &self.set, &self.explore, &self.temperature_max, &self.probability_min)?,
            "replaces": current.id,
            "reason": reason,
        });
        if self.new_salt {
            body["salt"] = Uuid::now_v7().simple().to_string().into();
        }
        let done: ExperimentView = client.put(PATH, &body).await?;
        self.output.print(&done, || page(&done))
    }
}

/// `alias=share`.
fn pair(text: &str) -> Result<(String, f64), String> {
    let (alias, share) = text
        .split_once('=')
        .ok_or("give alias=share, such as champion=0.7".to_owned())?;
    let share = share.trim().parse().map_err(|error| format!("{share:?}: {error}"))?;
    Ok((alias.trim().to_owned(), share))
}

/// `alias=bound`, or `alias=none`.
fn bound(text: &str) -> Result<(String, Option<f64>), String> {
    let (alias, bound) = text
        .split_once('=')
        .ok_or("give alias=number, such as champion=0.3, or alias=none".to_owned())?;
    let bound = match bound.trim() {
        "none" => None,
        number => match number.parse::<f64>() {
            Ok(bound) if bound.is_finite() => Some(bound),
            _ => return Err(format!("{number:?} is no bound: give a number, or none")),
        },
    };
    Ok((alias.trim().to_owned(), bound))
}

/// The arms to ask for. Arms stay in their order, because users move if it changes.
fn changed(
    current: &[ArmOptions],
    set: &[(String, f64)],
    explore: &[(String, f64)],
    temperature_max: &[(String, Option<f64>)],
    probability_min: &[(String, Option<f64>)],
) -> anyhow::Result<Vec<ArmOptions>> {
    let named = |pairs: &[(String, f64)], alias: &str| {
        let pair = pairs.iter().find(|(name, _)| name == alias);
        pair.map(|(_, share)| *share)
    };
    if let Some((twice, _)) = (set.iter().enumerate())
        .find(|(i, (alias, _))| named(&set[..*i], alias).is_some())
        .map(|(_, pair)| pair)
    {
        bail!("--set names {twice} twice");
    }
    let kept = current.iter().filter_map(|arm| match set {
        [] => Some(arm.clone()),
        set => Some(ArmOptions {
            weight: named(set, &arm.alias)?,
            ..arm.clone()
        }),
    });
    let new = set
        .iter()
        .filter(|(alias, _)| current.iter().all(|arm| arm.alias != *alias));
    let new = new.map(|(alias, weight)| ArmOptions {
        alias: alias.clone(),
        weight: *weight,
        explore: 0.0,
        temperature_max: None,
        probability_min: None,
    });
    let mut arms: Vec<ArmOptions> = kept.chain(new).collect();
    for (alias, share) in explore {
        let arm = arms.iter_mut().find(|arm| arm.alias == *alias);
        arm.with_context(|| format!("--explore names {alias}, which is no arm"))?
            .explore = *share;
    }
    for (alias, bound) in temperature_max {
        let arm = arms.iter_mut().find(|arm| arm.alias == *alias);
        arm.with_context(|| format!("--temperature-max names {alias}, which is no arm"))?
            .temperature_max = *bound;
    }
    for (alias, bar) in probability_min {
        let arm = arms.iter_mut().find(|arm| arm.alias == *alias);
        arm.with_context(|| format!("--probability-min names {alias}, which is no arm"))?
            .probability_min = *bar;
    }
    Ok(arms)
}

/// The experiment as text.
fn page(experiment: &ExperimentView) -> String {
    let share = |share: f64| format!("{:.1}%", share * 100.0);
    let bound = |side: &str, bound: Option<f64>| bound.map_or("any".to_owned(), |bound| format!("{side} {bound}"));
    let arms = experiment.arms.iter().map(|arm| {
        [
            arm.alias.clone(),
            share(arm.weight),
            share(arm.explore),
            bound("at most", arm.temperature_max),
            bound("at least", arm.probability_min),
            arm.version.map_or("none".to_owned(), |version| version.to_string()),
        ]
    });
    let head = ["arm", ">users", ">explores", ">temperature", ">probability", ">version"];
    let mut page = table(head, arms);
    let ExperimentView {
        epoch,
        actor,
        reason,
        learning_alias,
        champion_every,
        ..
    } = experiment;
    let salt = match experiment.salt.as_str() {
        "" => "none",
        salt => salt,
    };
    page += &format!(
        "\nsince {} (epoch {epoch}), by {actor}: {reason}\nsalt: {salt}\nthe realtime run learns from {learning_alias}; champion \
         moves every {champion_every} version(s)\n",
        rfc3339(experiment.since),
    );
    for warning in &experiment.warnings {
        page += &format!("warning: {warning}\n");
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arm(alias: &str, weight: f64, explore: f64) -> ArmOptions {
        ArmOptions {
            alias: alias.to_owned(),
            weight,
            explore,
            temperature_max: None,
            probability_min: None,
        }
    }

    fn pairs(text: &str) -> Vec<(String, f64)> {
        text.split(',').map(|text| pair(text).unwrap()).collect()
    }

    #[test]
    fn a_change_keeps_the_order_and_what_it_does_not_name() {
        let current = [
            arm("learner", 0.3, 0.02),
            arm("champion", 0.5, 0.0),
            arm("base", 0.2, 0.0),
        ];
        let set = pairs("base=0.1,canary=0.1,champion=0.6,learner=0.2");
        let arms = changed(&current, &set, &pairs("canary=0.5"), &[], &[]).unwrap();
        let expected = [
            arm("learner", 0.2, 0.02),
            arm("champion", 0.6, 0.0),
            arm("base", 0.1, 0.0),
            arm("canary", 0.1, 0.5),
        ];
        assert_eq!(arms, expected);
        let without_base = changed(&current, &pairs("champion=0.7, learner=0.3"), &[], &[], &[]).unwrap();
        assert_eq!(without_base, [arm("learner", 0.3, 0.02), arm("champion", 0.7, 0.0)]);
        let explored = changed(&current, &[], &pairs("learner=0"), &[], &[]).unwrap();
        assert_eq!((explored.len(), &explored[0]), (3, &arm("learner", 0.3, 0.0)));
    }

    #[test]
    fn a_bound_on_the_temperature_stays_until_it_is_changed_or_taken_away() {
        let bounded = |bound| ArmOptions {
            temperature_max: bound,
            ..arm("champion", 0.5, 0.0)
        };
        let current = [arm("learner", 0.5, 0.02), bounded(Some(0.3))];
        let kept = changed(&current, &pairs("champion=0.6,learner=0.4"), &[], &[], &[]).unwrap();
        assert_eq!(kept[1].temperature_max, Some(0.3));
        for (text, expected) in [
            ("champion=0.7", Some(0.7)),
            ("champion = 0", Some(0.0)),
            ("champion=none", None),
        ] {
            let arms = changed(&current, &[], &[], &[bound(text).unwrap()], &[]).unwrap();
            assert_eq!(arms, [current[0].clone(), bounded(expected)], "{text}");
        }
        let unknown = changed(&current, &[], &[], &[bound("base=1").unwrap()], &[]).unwrap_err();
        assert_eq!(unknown.to_string(), "--temperature-max names base, which is no arm");
        for (text, expected) in [
            ("champion", "alias=number"),
            ("champion=cold", "\"cold\" is no bound"),
            ("champion=nan", "\"nan\" is no bound"),
        ] {
            let error = bound(text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        // an arm without bounds has no such fields
        let old = json!({"alias": "learner", "weight": 0.5, "explore": 0.02});
        let read: ArmOptions = serde_json::from_value(old.clone()).unwrap();
        assert_eq!((&read, json!(read)), (&current[0], old));
    }

    #[test]
    fn a_bar_stays_until_it_is_changed_or_taken_away() {
        let barred = |bar| ArmOptions {
            probability_min: bar,
            ..arm("champion", 0.5, 0.0)
        };
        let current = [arm("learner", 0.5, 0.02), barred(Some(0.25))];
        let kept = changed(&current, &[], &pairs("learner=0.1"), &[], &[]).unwrap();
        assert_eq!(kept[1], current[1]);
        for (text, expected) in [("champion=0.5", Some(0.5)), ("champion=none", None)] {
            let arms = changed(&current, &[], &[], &[], &[bound(text).unwrap()]).unwrap();
            assert_eq!(arms, [current[0].clone(), barred(expected)], "{text}");
        }
        let unknown = changed(&current, &[], &[], &[], &[bound("base=0.5").unwrap()]).unwrap_err();
        assert_eq!(unknown.to_string(), "--probability-min names base, which is no arm");
    }

    #[test]
    fn a_change_that_contradicts_itself_is_refused() {
        let current = [arm("learner", 1.0, 0.0)];
        let refused = |set: &[(String, f64)], explore: &[(String, f64)]| {
            changed(&current, set, explore, &[], &[]).unwrap_err().to_string()
        };
        assert_eq!(
            refused(&pairs("learner=0.5,learner=0.5"), &[]),
            "--set names learner twice"
        );
        assert_eq!(
            refused(&[], &pairs("base=0.1")),
            "--explore names base, which is no arm"
        );
        assert!(pair("learner").unwrap_err().contains("alias=share"));
        assert!(pair("learner=much").unwrap_err().contains("much"));
    }

    #[test]
    fn the_page_has_the_shares_and_the_warnings() {
        let experiment = json!({
            "policy": "demo", "id": Uuid::nil(), "source": "request", "epoch": 12, "salt": "", "since": "2026-11-27T10:00:00Z", "actor": "ana", "reason": "more champions",
            "learning_alias": "learner", "champion_every": 1, "warnings": ["no arm serves `learner`"],
            "arms": [{"alias": "champion", "weight": 0.95, "explore": 0.02, "temperature_max": 0.3,
                      "probability_min": 0.25, "version": 41},
                     {"alias": "canary", "weight": 0.05, "explore": 0.0, "version": null}],
        });
        let page = page(&serde_json::from_value(experiment).unwrap());
        let page = page.split_whitespace().collect::<Vec<_>>().join(" ");
        for expected in [
            "champion 95.0% 2.0% at most 0.3 at least 0.25 41",
            "canary 5.0% 0.0% any any none",
            "by ana: more champions salt: none",
            "warning: no arm serves `learner`",
        ] {
            assert!(page.contains(expected), "no {expected:?} in\n{page}");
        }
    }
}
