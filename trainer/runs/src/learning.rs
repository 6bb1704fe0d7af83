//! The alias that the realtime run learns from. The database decides it: the table `experiment`, which
//! `control` writes, has the arms in force. No file of the trainer can contradict it, because a
//! generation of another arm is set aside for ever.

use artifact::assignment::{CHAMPION, LEARNER};
use sqlx::PgPool;

/// The alias to learn from, as the tables have it now.
#[derive(Debug, Clone, PartialEq)]
pub struct Learning {
    /// `learner` if an arm in force serves it, else `champion`, also until `control` has written the
    /// first arms.
    pub alias: &'static str,
    /// `None`: it has no version yet.
    pub target: Option<Target>,
    arms: Arms,
}

/// Where an alias is.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    pub version: i64,
    pub follows: Option<String>,
    pub branch: i32,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Arms {
    /// There are none yet.
    None,
    /// One of them serves the alias.
    Serve,
    Others,
}

pub async fn read(pool: &PgPool, policy: &str) -> Result<Learning, sqlx::Error> {
    let row = sqlx::query!(
        r#"
        with newest as (select arms from experiment where policy = $1 order by epoch desc limit 1),
        learning as (
            select case when exists (select from newest where arms @> jsonb_build_array(jsonb_build_object('alias', $2::text)))
                        then $2::text else $3::text end as alias
        )
        select learning.alias = $2 as "learner!", (select count(*) from newest) as "experiments!",
               exists (select from newest where arms @> jsonb_build_array(jsonb_build_object('alias', learning.alias))) as "served!",
               a.version as "version?", a.follows, a.branch as "branch?"
        from learning
        left join alias a on a.policy = $1 and a.alias = learning.alias and not a.withdrawn
        "#,
        policy,
        LEARNER,
        CHAMPION
    )
    .fetch_one(pool)
    .await?;
    let target = row.version.zip(row.branch).map(|(version, branch)| Target {
        version,
        follows: row.follows,
        branch,
    });
    Ok(Learning {
        alias: if row.learner { LEARNER } else { CHAMPION },
        target,
        arms: match (row.experiments, row.served) {
            (0, _) => Arms::None,
            (_, true) => Arms::Serve,
            (_, false) => Arms::Others,
        },
    })
}

impl Learning {
    /// Why nothing can be learned now, and what to do. `named`: by the trainer's own configuration.
    pub fn obstacle(&self, named: Option<&str>) -> Option<Obstacle> {
        let alias = self.alias;
        if self.target.is_none() && self.arms == Arms::None {
            return Some(Obstacle::NothingAssigned);
        }
        if let Some(named) = named.filter(|named| *named != alias) {
            return Some(Obstacle::OtherNamed(format!(
                "trainer.realtime.alias of this trainer is {named:?}, but the arms in force are those of a run that learns \
                 from `{alias}`: remove the setting from the trainer's file, or change the arms of `control` \
                 (docs/guide-release.md, How traffic is shared)"
            )));
        }
        if self.arms == Arms::Others {
            return Some(Obstacle::NoArm(format!(
                "no arm in force serves `{alias}`: give it an arm with `springtide release arms --set …`"
            )));
        }
        self.target.is_none().then(|| {
            Obstacle::NoVersion(format!(
                "`{alias}` has no version yet: `control` gives it one; look at its log and at `springtide release list`"
            ))
        })
    }
}

/// Why the run waits.
#[derive(Debug, Clone, PartialEq)]
pub enum Obstacle {
    /// The policy has just begun.
    NothingAssigned,
    OtherNamed(String),
    NoArm(String),
    NoVersion(String),
}

impl Obstacle {
    /// What a person should do. `None`: nothing.
    pub fn advice(&self) -> Option<&str> {
        match self {
            Obstacle::NothingAssigned => None,
            Obstacle::OtherNamed(advice) | Obstacle::NoArm(advice) | Obstacle::NoVersion(advice) => Some(advice),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learning(arms: Arms, is_assigned: bool) -> Learning {
        let target = Target {
            version: 7,
            follows: Some("realtime".into()),
            branch: 0,
        };
        Learning {
            alias: LEARNER,
            target: is_assigned.then_some(target),
            arms,
        }
    }

    #[test]
    fn a_run_waits_for_its_alias_and_never_learns_from_another_than_the_arms_say() {
        let obstacle = |arms, is_assigned, named| learning(arms, is_assigned).obstacle(named);
        assert_eq!(obstacle(Arms::Serve, true, None), None);
        assert_eq!(obstacle(Arms::Serve, true, Some(LEARNER)), None);
        assert_eq!(
            obstacle(Arms::None, true, None),
            None,
            "control has written no arms yet"
        );
        assert_eq!(obstacle(Arms::None, false, None), Some(Obstacle::NothingAssigned));
        assert_eq!(
            obstacle(Arms::None, false, Some(CHAMPION)),
            Some(Obstacle::NothingAssigned)
        );
        let advice = |obstacle: Option<Obstacle>| obstacle.unwrap().advice().unwrap().to_owned();
        assert!(advice(obstacle(Arms::Serve, true, Some(CHAMPION))).contains("remove the setting"));
        assert!(advice(obstacle(Arms::Others, true, None)).contains("give it an arm"));
        assert!(advice(obstacle(Arms::Serve, false, None)).contains("has no version yet"));
    }
}
