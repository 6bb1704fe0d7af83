//! Trajectories that need the answer of a judge: how long they wait for it, and what they become
//! without it.
//!
//! A trajectory needs an answer if its expression refers to the judge's metric, and a text was given
//! within its horizon that the judge reads. Without texts it needs none. While answers may still
//! come, it waits up to the judge's patience after its end. Then, or if an answer was given up, or the
//! text is older than the judge, it is censored: nobody guesses what the judge would have said.

use std::collections::BTreeMap;

use event_log::event::Target;
use sqlx::PgConnection;
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use crate::judge::{Judge, Judges};
use crate::reward::Rule;
use crate::reward::episode::Divided;
use crate::rows::judgement::{self, Arrived, Asked, Missing};

/// The censor code of a trajectory without an answer that it needs.
pub(super) const UNSCORED: &str = "unscored_judge";
/// How soon to look again for answers.
const POLL_MIN: Duration = Duration::SECOND;
/// The same as a share of how long it has waited.
const POLL_SHARE: f64 = 0.25;

/// The judges whose answers about a trajectory a rule reads. Of episodes: about the episode.
pub(super) fn judges_of<'a>(judges: &'a Judges, rule: &Rule) -> Vec<&'a Judge> {
    let judges = judges.iter().map(AsRef::as_ref);
    judges.filter(|judge: &&Judge| rule.refers_to(judge.metric())).collect()
}

/// The same about turns of an episode.
fn judges_of_turns<'a>(judges: &'a Judges, rule: &Rule) -> Vec<&'a Judge> {
    let judges = judges.iter().map(AsRef::as_ref);
    judges
        .filter(|judge: &&Judge| rule.turns_refer_to(judge.metric()))
        .collect()
}

/// What is to be done with a trajectory whose answers are not all there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Without {
    /// Look again at this time.
    Wait(OffsetDateTime),
    /// It is censored with [`UNSCORED`].
    Censor,
}

/// Trajectories that are over, each by the id of its generation or episode.
#[derive(Debug, Default)]
pub(super) struct Needs {
    asked: Vec<Asked>,
    /// Whose each of them is.
    owners: Vec<Uuid>,
    /// From when on and until when each waits.
    waits: BTreeMap<Uuid, (OffsetDateTime, OffsetDateTime)>,
}

impl Needs {
    /// `owner` needs the answers of these judges to texts about `target` that were given until
    /// `closes_at`. Of judges that do not read its tenant's texts, none.
    pub(super) fn add(
        &mut self,
        owner: Uuid,
        tenant: &str,
        target: Target,
        closes_at: OffsetDateTime,
        arrived: Option<Arrived>,
        judges: &[&Judge],
    ) {
        for judge in judges.iter().filter(|judge| judge.reads_texts_of(tenant)) {
            self.asked.push(Asked {
                tenant: tenant.to_owned(),
                target,
                judge: judge.name().to_owned(),
                of: judge.of().to_owned(),
                until: closes_at,
                arrived,
            });
            self.owners.push(owner);
        }
    }

    /// What an episode needs, and how long it waits.
    pub(super) fn add_episode(
        &mut self,
        (id, tenant): (Uuid, &str),
        divided: &Divided,
        arrived: Option<Arrived>,
        judges: &Judges,
        rule: &Rule,
    ) {
        let (of_episode, of_turns) = (judges_of(judges, rule), judges_of_turns(judges, rule));
        let closes_at = divided.closes_at;
        self.add(id, tenant, Target::Episode(id), closes_at, arrived, &of_episode);
        for turn in &divided.turns {
            self.add(id, tenant, Target::Generation(turn.id), closes_at, arrived, &of_turns);
        }
        let stored_at = divided.turns.iter().map(|turn| turn.stored_at);
        let over_at = stored_at.fold(divided.over_at, OffsetDateTime::max);
        self.wait(id, over_at, of_episode.iter().chain(&of_turns));
    }

    /// How long `owner` waits from `over_at` on. Without it, it does not wait.
    pub(super) fn wait<'a>(
        &mut self,
        owner: Uuid,
        over_at: OffsetDateTime,
        judges: impl IntoIterator<Item = &'a &'a Judge>,
    ) {
        let patience = judges.into_iter().map(|judge| judge.patience()).max();
        if let Some(patience) = patience {
            self.waits.insert(owner, (over_at, over_at + patience));
        }
    }

    /// What is to be done with each trajectory that lacks an answer. The tables hold all events up to
    /// `until`.
    pub(super) async fn without(
        &self,
        connection: &mut PgConnection,
        until: OffsetDateTime,
    ) -> sqlx::Result<BTreeMap<Uuid, Without>> {
        let missing = self.missing(connection).await?;
        let missing = missing.into_iter().map(|(owner, missing)| {
            let wait = self.waits.get(&owner).filter(|_| missing == Missing::Open);
            let without = match wait {
                Some((over_at, deadline)) if until < *deadline => Without::Wait(look_again(*over_at, *deadline, until)),
                _ => Without::Censor,
            };
            (owner, without)
        });
        Ok(missing.collect())
    }

    /// What each trajectory lacks.
    pub(super) async fn missing(&self, connection: &mut PgConnection) -> sqlx::Result<BTreeMap<Uuid, Missing>> {
        let mut by_owner: BTreeMap<Uuid, Missing> = BTreeMap::new();
        let missing = judgement::missing(connection, &self.asked).await?;
        for (owner, missing) in self.owners.iter().zip(missing) {
            if let Some(missing) = missing {
                let worst = by_owner.entry(*owner).or_insert(missing);
                *worst = missing.max(*worst);
            }
        }
        Ok(by_owner)
    }
}

/// Later and later, because a judge that is down keeps everything waiting.
fn look_again(over_at: OffsetDateTime, deadline: OffsetDateTime, now: OffsetDateTime) -> OffsetDateTime {
    let pause = ((now - over_at) * POLL_SHARE).max(POLL_MIN);
    (now + pause).min(deadline)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trajectory_is_looked_at_rarely_and_not_after_its_deadline() {
        let (over_at, deadline) = (
            OffsetDateTime::UNIX_EPOCH,
            OffsetDateTime::UNIX_EPOCH + Duration::seconds(60),
        );
        let after = |seconds: i64| over_at + Duration::seconds(seconds);
        assert_eq!(look_again(over_at, deadline, after(0)), after(1));
        assert_eq!(look_again(over_at, deadline, after(40)), after(50));
        assert_eq!(look_again(over_at, deadline, after(59)), deadline);
        let (mut now, mut looks) = (over_at, 0);
        while now < deadline {
            now = look_again(over_at, deadline, now);
            looks += 1;
        }
        assert!(looks < 20, "{looks}");
    }
}
