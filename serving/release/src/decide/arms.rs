//! How users are divided: by the configuration until a request says otherwise, then by requests.
//! Pure; `release::experiment` carries requests out, the release loop the configuration.

use super::super::options::check_arms;
use super::super::{ArmOptions, CANARY, CHAMPION, LEARNER, Learning, LearningAlias};
use super::ReleaseState;
use super::manual::check_name;
use artifact::assignment;
use model::sampling::TRAINABLE_TEMPERATURES;
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use uuid::Uuid;

/// The newest row of a policy's experiment.
#[derive(Debug, Clone, PartialEq)]
pub struct Experiment {
    pub id: Uuid,
    /// The first assignment that divides users by it.
    pub epoch: i64,
    /// Empty: none.
    pub salt: String,
    pub arms: Vec<ArmOptions>,
    pub source: Source,
    pub actor: String,
    pub reason: String,
    pub created_at: OffsetDateTime,
}

/// Who decided an experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// A changed configuration replaces it.
    Configuration,
    /// Only a request replaces it.
    Request,
}

impl Source {
    pub fn name(self) -> &'static str {
        match self {
            Source::Configuration => "configuration",
            Source::Request => "request",
        }
    }
}

/// An experiment to be written.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    pub salt: String,
    pub arms: Vec<ArmOptions>,
    pub source: Source,
    pub reason: String,
}

impl Draft {
    /// For people: `learner 0.3 (explores 0.02), champion 0.5, base 0.2, salt spring`.
    pub fn text(&self) -> String {
        let salt = match self.salt.is_empty() {
            true => String::new(),
            false => format!(", salt {}", self.salt),
        };
        describe(&self.arms) + &salt
    }
}

/// For people: `learner 0.3 (explores 0.02), champion 0.7 (temperature at most 0.3)`.
fn describe(arms: &[ArmOptions]) -> String {
    let arms = arms.iter().map(|arm| {
        let explores = (arm.explore > 0.0).then(|| format!("explores {}", arm.explore));
        let bound = arm.temperature_max.map(|max| format!("temperature at most {max}"));
        let bar = arm.probability_min.map(|min| format!("shows from probability {min}"));
        let rest: Vec<String> = explores.into_iter().chain(bound).chain(bar).collect();
        match rest.is_empty() {
            true => format!("{} {}", arm.alias, arm.weight),
            false => format!("{} {} ({})", arm.alias, arm.weight, rest.join(", ")),
        }
    });
    arms.collect::<Vec<_>>().join(", ")
}

/// What the configuration changes. `None`: nothing.
///
/// The salt stays: only a request draws users anew.
pub fn by_configuration(current: Option<&Experiment>, configured: &[ArmOptions]) -> Option<Draft> {
    let reason = match current {
        None => "the configuration's arms: there were none before",
        Some(current) if current.source == Source::Configuration && current.arms != configured => {
            "the arms of the configuration changed"
        }
        Some(_) => return None,
    };
    Some(Draft {
        salt: current.map(|current| current.salt.clone()).unwrap_or_default(),
        arms: configured.to_vec(),
        source: Source::Configuration,
        reason: reason.into(),
    })
}

/// The body of `PUT /v1/experiment`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExperimentRequest {
    /// All arms. An arm that is not named is no arm any more.
    pub arms: Vec<ArmOptions>,
    /// Another salt draws every user's arm anew. Without it, the salt stays.
    pub salt: Option<String>,
    /// The id of the experiment that this one replaces. If another is in force, the request is
    /// refused.
    pub replaces: Option<Uuid>,
    /// For the audit.
    #[serde(default)]
    pub reason: String,
}

/// Why a request is refused. Each message says what to do.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum RequestError {
    #[error("{0}")]
    Arms(String),
    #[error("no version is assigned yet, so there is nothing to divide; GET /v1/aliases shows when there is")]
    NothingAssigned,
    #[error(
        "alias `{0}` does not exist, so nobody could be served by it: give it a version first, \
         with `springtide release pin VERSION --alias {0} --reason …`"
    )]
    NoAlias(String),
    #[error(
        "the arms have no `{0}`, which the realtime run learns from: keep an arm for it. To stop learning, \
         use `springtide release pin --alias {0} --reason …`"
    )]
    NoLearningArm(&'static str),
    #[error(
        "`learner` cannot have an arm, because the realtime run learns from champion, so nothing would move learner: to \
         move to learner, follow docs/guide-release.md, How traffic is shared"
    )]
    LearnerUnused,
    #[error(
        "a canary has users of champion, and other arms would end the comparison: end it first, with \
         `springtide canary abort --reason …`"
    )]
    CanaryServes,
    #[error("experiment {0} is not in force any more: look again with GET /v1/experiment")]
    Replaced(Uuid),
}

/// The experiment that a request asks for. `None`: it is in force already.
pub fn by_request(
    state: &ReleaseState,
    learning: Learning,
    request: &ExperimentRequest,
) -> Result<Option<Draft>, RequestError> {
    let current = state.experiment.as_ref();
    let malformed = |error: &dyn std::fmt::Display| RequestError::Arms(error.to_string());
    check_arms("arms", &request.arms).map_err(|error| malformed(&error))?;
    for arm in &request.arms {
        check_name(&arm.alias).map_err(|error| malformed(&error))?;
    }
    let salt = request.salt.clone();
    let salt = salt.unwrap_or_else(|| current.map(|current| current.salt.clone()).unwrap_or_default());
    assignment::check_salt(&salt).map_err(|error| malformed(&error))?;
    if state.aliases.iter().all(|alias| alias.withdrawn) {
        return Err(RequestError::NothingAssigned);
    }
    if state.canary_serves {
        return Err(RequestError::CanaryServes);
    }
    if let Some(replaces) = request.replaces
        && current.is_none_or(|current| current.id != replaces)
    {
        return Err(RequestError::Replaced(replaces));
    }
    if let Some(arm) = request.arms.iter().find(|arm| state.alias(&arm.alias).is_none()) {
        return Err(RequestError::NoAlias(arm.alias.clone()));
    }
    let learning_alias = learning.alias.name();
    if learning.enabled && request.arms.iter().all(|arm| arm.alias != learning_alias) {
        return Err(RequestError::NoLearningArm(learning_alias));
    }
    if learning.alias == LearningAlias::Champion && request.arms.iter().any(|arm| arm.alias == LEARNER) {
        return Err(RequestError::LearnerUnused);
    }
    let in_force = |current: &Experiment| {
        current.source == Source::Request && current.arms == request.arms && current.salt == salt
    };
    if current.is_some_and(in_force) {
        return Ok(None);
    }
    Ok(Some(Draft {
        salt,
        arms: request.arms.clone(),
        source: Source::Request,
        reason: request.reason.clone(),
    }))
}

/// The arms with a canary that takes `share` of `champion`'s users. It stands behind `champion`, so that
/// a larger share moves users of `champion` alone, and never back. Its requests are sampled, and its
/// texts shown, as `champion`'s are.
pub fn with_canary(arms: impl Iterator<Item = ArmOptions>, share: f64) -> Vec<ArmOptions> {
    // an arm of that name would be there twice
    let mut arms: Vec<ArmOptions> = arms.filter(|arm| arm.alias != CANARY).collect();
    if arms.is_empty() {
        // without arms all users are champion's
        arms.push(ArmOptions {
            alias: CHAMPION.into(),
            weight: 1.0,
            explore: 0.0,
            temperature_max: None,
            probability_min: None,
        });
    }
    if let Some(at) = arms.iter().position(|arm| arm.alias == CHAMPION) {
        let canary = ArmOptions {
            alias: CANARY.into(),
            weight: arms[at].weight * share,
            explore: arms[at].explore,
            temperature_max: arms[at].temperature_max,
            probability_min: arms[at].probability_min,
        };
        arms[at].weight -= canary.weight;
        arms.insert(at + 1, canary);
    }
    arms
}

/// What a person should know about the arms in force.
pub fn warnings(current: &Experiment, configured: &[ArmOptions], learning: Learning) -> Vec<String> {
    let mut warnings = Vec::new();
    if current.source == Source::Request && current.arms != configured {
        warnings.push(format!(
            "the configured [[release.arm]] ({}) are not used, because a request by {} set others ({}): change them in \
             springtide.toml, or set them with `springtide release arms`",
            describe(configured),
            current.actor,
            describe(&current.arms)
        ));
    }
    let alias = learning.alias.name();
    if learning.enabled && current.arms.iter().all(|arm| arm.alias != alias) {
        warnings.push(format!(
            "no arm serves `{alias}`, which the realtime run learns from, so it learns nothing: give it an arm with \
             `springtide release arms`"
        ));
    }
    let trainable_min = *TRAINABLE_TEMPERATURES.start();
    let bound = current.arms.iter().find(|arm| arm.alias == alias);
    let bound = bound.and_then(|arm| arm.temperature_max);
    if let Some(max) = bound.filter(|max| learning.enabled && (*max as f32) < trainable_min) {
        warnings.push(format!(
            "the arm `{alias}`, which the realtime run learns from, has temperature_max = {max}, and answers below \
             {trainable_min} are not trained on (greedy ones are, by the loss `verdicts`), so it learns nothing: give \
             {trainable_min} or more, or leave temperature_max out"
        ));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::super::Alias;
    use super::*;
    use time::macros::datetime;

    fn arms(arms: &[(&str, f64)]) -> Vec<ArmOptions> {
        let arm = |(alias, weight): &(&str, f64)| ArmOptions {
            alias: (*alias).into(),
            weight: *weight,
            explore: 0.0,
            temperature_max: None,
            probability_min: None,
        };
        arms.iter().map(arm).collect()
    }

    fn configured() -> Vec<ArmOptions> {
        arms(&[("learner", 0.3), ("champion", 0.5), ("base", 0.2)])
    }

    fn experiment(source: Source) -> Experiment {
        Experiment {
            id: Uuid::nil(),
            epoch: 4,
            salt: "spring".into(),
            arms: configured(),
            source,
            actor: "ana".into(),
            reason: "begin".into(),
            created_at: datetime!(2026-11-27 10:00 UTC),
        }
    }

    fn state(experiment: Option<Experiment>) -> ReleaseState {
        let alias = |name: &str, version, withdrawn| Alias {
            alias: name.into(),
            version,
            follows: None,
            branch: 0,
            withdrawn,
            created_at: datetime!(2026-11-27 10:00 UTC),
        };
        ReleaseState {
            aliases: vec![
                alias("learner", 9, false),
                alias("champion", 9, false),
                alias("base", 1, false),
                alias("canary", 7, true),
            ],
            experiment,
            ..ReleaseState::default()
        }
    }

    fn request(arms: Vec<ArmOptions>) -> ExperimentRequest {
        ExperimentRequest {
            arms,
            salt: None,
            replaces: None,
            reason: "more champions".into(),
        }
    }

    fn asked(state: &ReleaseState, request: &ExperimentRequest) -> Result<Option<Draft>, RequestError> {
        by_request(state, Learning::default(), request)
    }

    #[test]
    fn the_configuration_decides_until_a_request_does() {
        let first = by_configuration(None, &configured()).unwrap();
        assert_eq!((first.salt.as_str(), first.source), ("", Source::Configuration));
        assert_eq!(first.arms, configured());
        let by_file = experiment(Source::Configuration);
        assert_eq!(by_configuration(Some(&by_file), &configured()), None);
        let other = arms(&[("champion", 1.0)]);
        let changed = by_configuration(Some(&by_file), &other).unwrap();
        assert_eq!(
            (changed.salt.as_str(), &changed.arms),
            ("spring", &other),
            "the salt stays"
        );
        let by_key = experiment(Source::Request);
        assert_eq!(by_configuration(Some(&by_key), &other), None);
    }

    #[test]
    fn another_order_of_the_same_arms_is_another_experiment_because_users_move() {
        let mut reversed = configured();
        reversed.reverse();
        assert!(by_configuration(Some(&experiment(Source::Configuration)), &reversed).is_some());
    }

    #[test]
    fn a_request_replaces_arms_and_keeps_the_salt_unless_it_gives_another() {
        let state = state(Some(experiment(Source::Configuration)));
        let wanted = arms(&[("learner", 0.2), ("champion", 0.7), ("base", 0.1)]);
        let draft = asked(&state, &request(wanted.clone())).unwrap().unwrap();
        assert_eq!(
            draft,
            Draft {
                salt: "spring".into(),
                arms: wanted.clone(),
                source: Source::Request,
                reason: "more champions".into()
            }
        );
        let salted = ExperimentRequest {
            salt: Some("summer".into()),
            ..request(wanted)
        };
        assert_eq!(asked(&state, &salted).unwrap().unwrap().salt, "summer");
        let text = asked(&state, &salted).unwrap().unwrap().text();
        assert_eq!(text, "learner 0.2, champion 0.7, base 0.1, salt summer");
    }

    #[test]
    fn what_an_arm_explores_and_its_bounds_are_told() {
        let mut told = configured();
        told[0].explore = 0.02;
        told[1].temperature_max = Some(0.3);
        assert_eq!(
            describe(&told),
            "learner 0.3 (explores 0.02), champion 0.5 (temperature at most 0.3), base 0.2"
        );
        told[0].temperature_max = Some(0.0);
        let learner = "learner 0.3 (explores 0.02, temperature at most 0), ";
        assert!(describe(&told).starts_with(learner), "{}", describe(&told));
        told[1].probability_min = Some(0.25);
        let champion = "champion 0.5 (temperature at most 0.3, shows from probability 0.25)";
        assert!(describe(&told).contains(champion), "{}", describe(&told));
    }

    #[test]
    fn another_bound_is_another_experiment() {
        let mut bounded = configured();
        bounded[1].temperature_max = Some(0.3);
        let by_file = experiment(Source::Configuration);
        assert_eq!(by_configuration(Some(&by_file), &bounded).unwrap().arms, bounded);
        let by_key = state(Some(experiment(Source::Request)));
        assert_eq!(
            asked(&by_key, &request(bounded.clone())).unwrap().unwrap().arms,
            bounded
        );
        bounded[1].temperature_max = Some(2.5);
        let refused = asked(&by_key, &request(bounded));
        assert!(matches!(refused, Err(RequestError::Arms(why)) if why.contains("temperature_max = 2.5")));
        let mut barred = configured();
        barred[1].probability_min = Some(0.25);
        assert_eq!(by_configuration(Some(&by_file), &barred).unwrap().arms, barred);
        barred[1].probability_min = Some(1.0);
        let refused = asked(&by_key, &request(barred));
        assert!(
            matches!(refused, Err(RequestError::Arms(why)) if why.contains("probability_min = 1; give 0 to below 1"))
        );
    }

    #[test]
    fn a_canarys_users_get_what_champions_would() {
        let mut arms = configured();
        arms[1].explore = 0.02;
        arms[1].temperature_max = Some(0.3);
        arms[1].probability_min = Some(0.25);
        let arms = with_canary(arms.into_iter(), 0.1);
        let found = |alias: &str| {
            let arm = arms.iter().find(|arm| arm.alias == alias).unwrap();
            (arm.explore, arm.temperature_max, arm.probability_min)
        };
        assert_eq!(found(CHAMPION), (0.02, Some(0.3), Some(0.25)));
        assert_eq!(found(CANARY), found(CHAMPION));
        assert_eq!(found(LEARNER), (0.0, None, None));
        let alone = &with_canary(std::iter::empty(), 0.1)[1];
        assert_eq!((alone.temperature_max, alone.probability_min), (None, None));
    }

    #[test]
    fn the_same_request_again_changes_nothing_but_confirming_the_configuration_does() {
        let by_key = state(Some(experiment(Source::Request)));
        assert_eq!(asked(&by_key, &request(configured())), Ok(None));
        let by_file = state(Some(experiment(Source::Configuration)));
        let confirmed = asked(&by_file, &request(configured())).unwrap().unwrap();
        assert_eq!(
            confirmed.source,
            Source::Request,
            "from now on the configuration does not count"
        );
    }

    #[test]
    fn an_invalid_request_is_refused_with_advice() {
        let state = state(Some(experiment(Source::Request)));
        let refusal = |request: &ExperimentRequest| asked(&state, request).unwrap_err();
        let malformed = |arms| match refusal(&request(arms)) {
            RequestError::Arms(why) => why,
            other => panic!("{other}"),
        };
        assert!(malformed(vec![]).contains("arms is empty"));
        assert!(malformed(arms(&[("learner", 0.5), ("base", 0.4)])).contains("sum to 1"));
        assert!(malformed(arms(&[("learner", 1.0), ("base", 0.0)])).contains("above 0"));
        assert!(malformed(arms(&[("learner", 0.5), ("learner", 0.5)])).contains("twice"));
        assert!(malformed(arms(&[("learner", 0.5), ("Base", 0.5)])).contains("is not a name"));
        assert!(malformed(arms(&[("learner", 0.5), ("run-00000000", 0.5)])).contains("belongs to a run"));
        let salted = ExperimentRequest {
            salt: Some("Sommer 26".into()),
            ..request(configured())
        };
        assert!(matches!(refusal(&salted), RequestError::Arms(why) if why.contains("salt")));
        for missing in ["ghost", "canary"] {
            let unknown = request(arms(&[("learner", 0.5), (missing, 0.5)]));
            assert_eq!(refusal(&unknown), RequestError::NoAlias(missing.into()));
        }
        let unlearned = request(arms(&[("champion", 1.0)]));
        assert_eq!(refusal(&unlearned), RequestError::NoLearningArm("learner"));
        let stale = ExperimentRequest {
            replaces: Some(Uuid::max()),
            ..request(configured())
        };
        assert_eq!(refusal(&stale), RequestError::Replaced(Uuid::max()));
        assert_eq!(
            asked(&ReleaseState::default(), &request(configured())),
            Err(RequestError::NothingAssigned)
        );
    }

    #[test]
    fn without_learning_no_arm_is_needed_for_it() {
        let learning = Learning {
            enabled: false,
            ..Learning::default()
        };
        let state = state(None);
        let alone = request(arms(&[("champion", 1.0)]));
        assert!(by_request(&state, learning, &alone).unwrap().is_some());
        let old = Learning {
            alias: LearningAlias::Champion,
            enabled: true,
        };
        assert!(by_request(&state, old, &alone).unwrap().is_some());
        // the trainer learns from `learner` as soon as an arm serves it
        let both = request(arms(&[("champion", 0.5), ("learner", 0.5)]));
        assert_eq!(by_request(&state, old, &both), Err(RequestError::LearnerUnused));
    }

    #[test]
    fn a_person_is_warned_about_arms_that_do_not_count_and_an_arm_that_is_missing() {
        let learning = Learning::default();
        let by_key = experiment(Source::Request);
        assert_eq!(warnings(&by_key, &configured(), learning), Vec::<String>::new());
        let ignored = warnings(&by_key, &arms(&[("learner", 1.0)]), learning);
        assert!(
            ignored.len() == 1 && ignored[0].contains("not used") && ignored[0].contains("ana"),
            "{ignored:?}"
        );
        let by_file = Experiment {
            arms: arms(&[("champion", 1.0)]),
            ..experiment(Source::Configuration)
        };
        let starving = warnings(&by_file, &configured(), learning);
        assert!(
            starving.len() == 1 && starving[0].contains("learns nothing"),
            "{starving:?}"
        );
        let bounded = |alias: usize, max| {
            let mut cold = experiment(Source::Configuration);
            cold.arms[alias].temperature_max = Some(max);
            warnings(&cold, &configured(), learning)
        };
        let cold = bounded(0, 0.3);
        assert!(
            cold.len() == 1 && cold[0].contains("temperature_max = 0.3, and answers below 0.5 are not trained on"),
            "{cold:?}"
        );
        assert_eq!((bounded(0, 0.5), bounded(1, 0.3)), (vec![], vec![]));
    }
}
