//! What a key may do. A scope is one kind of work; a role is a name for a set of scopes.

use std::fmt;

use anyhow::bail;

/// One kind of work. Every route needs one scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Give feedback. Alone, only with the token of the answer; see [`Principal::needs_feedback_token`].
    ///
    /// [`Principal::needs_feedback_token`]: super::Principal::needs_feedback_token
    Feedback,
    /// Log generations and upload their payloads.
    Generations,
    /// Request completions.
    Completions,
    /// Have one's completions go before those of other callers: a `priority` below 0.
    Priority,
    /// Have what users typed learned from: the feedback `demonstration`.
    Teach,
    /// Report to `control` as one replica.
    Replica,
    /// Read models, runs, versions, releases, the fleet, the ledger and metrics.
    Read,
    /// See prompts and answers.
    Texts,
    /// Schedule, pause and cancel runs.
    Research,
    /// Lease cohorts, read their samples, and commit what was trained on them.
    Train,
    /// Move versions to users.
    Release,
    /// Everything.
    Admin,
}

impl Scope {
    pub const ALL: [Self; 12] = [
        Self::Feedback,
        Self::Generations,
        Self::Completions,
        Self::Priority,
        Self::Teach,
        Self::Replica,
        Self::Read,
        Self::Texts,
        Self::Research,
        Self::Train,
        Self::Release,
        Self::Admin,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Feedback => "feedback",
            Self::Generations => "generations",
            Self::Completions => "completions",
            Self::Priority => "priority",
            Self::Teach => "teach",
            Self::Replica => "replica",
            Self::Read => "read",
            Self::Texts => "texts",
            Self::Research => "research",
            Self::Train => "train",
            Self::Release => "release",
            Self::Admin => "admin",
        }
    }

    /// What it allows, for people.
    pub fn about(self) -> &'static str {
        match self {
            Self::Feedback => "give feedback; alone, only with the token of the answer",
            Self::Generations => "log generations and upload their payloads",
            Self::Completions => "request completions",
            Self::Priority => "have completions go before other callers': a `priority` below 0",
            Self::Teach => "have `demonstration`s learned from by the realtime run",
            Self::Replica => "report to `control` as a replica",
            Self::Read => "read models, runs, versions, releases, the fleet, the ledger and metrics",
            Self::Texts => "see prompts and answers; each reading is in the audit",
            Self::Research => "schedule, pause and cancel runs",
            Self::Train => "lease cohorts with their samples, and commit what was trained on them",
            Self::Release => "move versions to users",
            Self::Admin => "everything",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|scope| scope.as_str() == text)
    }

    const fn bit(self) -> u16 {
        1 << self as u8
    }
}

/// A set of scopes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Scopes(u16);

impl Scopes {
    pub fn of(scopes: &[Scope]) -> Self {
        Self(scopes.iter().fold(0, |bits, scope| bits | scope.bit()))
    }

    /// Fails at a name that this program does not know: it may stand for a limit.
    pub fn parse<T: AsRef<str>>(names: &[T]) -> anyhow::Result<Self> {
        let mut bits = 0;
        for name in names {
            let name = name.as_ref();
            match Scope::parse(name) {
                Some(scope) => bits |= scope.bit(),
                None => bail!("unknown scope {name:?}"),
            }
        }
        Ok(Self(bits))
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether they allow what needs `scope`.
    pub fn allow(self, scope: Scope) -> bool {
        self.0 & (scope.bit() | Scope::Admin.bit()) != 0
    }

    /// The scopes of both.
    pub fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub fn iter(self) -> impl Iterator<Item = Scope> {
        Scope::ALL.into_iter().filter(move |scope| self.0 & scope.bit() != 0)
    }

    pub fn names(self) -> Vec<String> {
        self.iter().map(|scope| scope.as_str().to_owned()).collect()
    }
}

impl fmt::Display for Scopes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names().join(", "))
    }
}

impl fmt::Debug for Scopes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

/// A set of scopes with a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Request completions, log generations, send feedback, report as a replica, read.
    Serving,
    /// Schedule training runs, request completions, send feedback, read.
    Research,
    /// Move versions to users, read.
    Release,
    /// Everything.
    Admin,
}

impl Role {
    pub const ALL: [Self; 4] = [Self::Serving, Self::Research, Self::Release, Self::Admin];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Research => "research",
            Self::Release => "release",
            Self::Admin => "admin",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.as_str() == text)
    }

    pub fn scopes(self) -> Scopes {
        use Scope::{Admin, Completions, Feedback, Generations, Read, Release, Replica, Research};
        Scopes::of(match self {
            Self::Serving => &[Completions, Generations, Feedback, Replica, Read],
            Self::Research => &[Research, Completions, Feedback, Read],
            Self::Release => &[Release, Read],
            Self::Admin => &[Admin],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scope_and_role_round_trips_through_its_name() {
        for scope in Scope::ALL {
            assert_eq!(Scope::parse(scope.as_str()), Some(scope));
            assert_eq!(Scopes::of(&[scope]).iter().collect::<Vec<_>>(), [scope]);
        }
        for role in Role::ALL {
            assert_eq!(Role::parse(role.as_str()), Some(role));
            assert_eq!(Scopes::parse(&role.scopes().names()).unwrap(), role.scopes());
        }
        assert_eq!(Role::parse("root"), None);
        assert!(Scopes::parse(&["read", "root"]).is_err());
    }

    #[test]
    fn a_scope_allows_only_its_own_work_and_admin_allows_all() {
        for scope in Scope::ALL {
            let allowed: Vec<_> = Scope::ALL
                .into_iter()
                .filter(|needed| Scopes::of(&[scope]).allow(*needed))
                .collect();
            match scope {
                Scope::Admin => assert_eq!(allowed, Scope::ALL),
                _ => assert_eq!(allowed, [scope]),
            }
        }
        assert!(!Scopes::default().allow(Scope::Read));
    }

    #[test]
    fn every_role_reads_and_only_admin_does_everything() {
        for role in Role::ALL {
            assert!(role.scopes().allow(Scope::Read), "{role:?}");
            assert_eq!(role.scopes().allow(Scope::Admin), role == Role::Admin);
        }
        assert!(!Role::Release.scopes().allow(Scope::Feedback));
        assert!(!Role::Serving.scopes().allow(Scope::Release));
        let may_go_first = Role::ALL.map(|role| role.scopes().allow(Scope::Priority));
        assert_eq!(may_go_first, [false, false, false, true], "only admin");
    }
}
