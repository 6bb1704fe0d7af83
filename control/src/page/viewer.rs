//! Who looks, and what that decides about a page.

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use edge::Problem;
use edge::auth::{Principal, Scope};
use uuid::Uuid;

/// Whoever opened a page.
#[derive(Debug, Clone)]
pub struct Viewer {
    /// Of the key.
    pub label: String,
    /// Its lineage, which a renewed key shares. `None`: no key is needed, and there is none to forget.
    pub key: Option<Uuid>,
    /// Prompts and answers.
    pub may_read_texts: bool,
    pub audience: Audience,
}

/// Everything about a viewer that the content of a region depends on. Viewers of one audience share
/// what is read and rendered for the live parts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Audience {
    /// Whose rows are shown. `None`: those of all tenants, to administrators.
    pub tenant: Option<String>,
    /// May move versions to users.
    pub may_release: bool,
    /// May pause and resume runs.
    pub may_research: bool,
}

impl Audience {
    pub fn tenant(&self) -> Option<&str> {
        self.tenant.as_deref()
    }

    #[cfg(test)]
    pub fn with(may_release: bool) -> Self {
        Self {
            tenant: None,
            may_release,
            may_research: may_release,
        }
    }
}

impl From<&Principal> for Viewer {
    fn from(principal: &Principal) -> Self {
        let scopes = principal.scopes;
        Self {
            label: principal.label.clone(),
            key: principal.key.map(|key| key.lineage),
            may_read_texts: scopes.allow(Scope::Texts),
            audience: Audience {
                tenant: (!scopes.allow(Scope::Admin)).then(|| principal.tenant.clone()),
                may_release: scopes.allow(Scope::Release),
                may_research: scopes.allow(Scope::Research),
            },
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Viewer {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let principal = Principal::from_request_parts(parts, state).await?;
        Ok(Self::from(&principal))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use edge::auth::Role;

    #[test]
    fn only_administrators_see_the_rows_of_all_tenants() {
        let of = |role| Viewer::from(&Principal::with_role("ours", role, "ada")).audience;
        assert_eq!(of(Role::Admin).tenant, None);
        assert!(of(Role::Admin).may_release && of(Role::Admin).may_research);
        for (role, may_release, may_research) in [
            (Role::Release, true, false),
            (Role::Research, false, true),
            (Role::Serving, false, false),
        ] {
            let audience = of(role);
            assert_eq!(audience.tenant(), Some("ours"));
            assert_eq!(
                (audience.may_release, audience.may_research),
                (may_release, may_research)
            );
        }
    }
}
