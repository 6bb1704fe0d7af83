//! Who asks, whose rows that shows, and what the audit keeps of it.

use edge::Problem;
use edge::audit::{self, Change};
use edge::auth::{Principal, Scope};
use sqlx::PgPool;

use crate::tables::unavailable;

/// Of a reason.
const REASON_CHARS_MAX: usize = 500;

/// Why somebody does something, for the audit.
pub fn reason(reason: &str) -> Result<&str, Problem> {
    let reason = reason.trim();
    if reason.is_empty() || reason.chars().count() > REASON_CHARS_MAX {
        return Err(Problem::bad_request(format!(
            "reason: say why in 1 to {REASON_CHARS_MAX} characters; the audit keeps it"
        )));
    }
    Ok(reason)
}

/// Writes rows of the audit, and returns once they are committed.
pub async fn note(pool: &PgPool, principal: &Principal, changes: &[Change<'_>]) -> Result<(), Problem> {
    let mut transaction = edge::database::begin(pool).await.map_err(unavailable)?;
    audit::append_all(&mut transaction, principal.actor(), changes)
        .await
        .map_err(unavailable)?;
    transaction.commit().await.map_err(unavailable)
}

/// Whose rows a query shows: those of the caller's tenant, for administrators those of `requested`,
/// or all.
pub fn visible_tenant<'a>(principal: &'a Principal, requested: Option<&'a str>) -> Result<Option<&'a str>, Problem> {
    if principal.scopes.allow(Scope::Admin) {
        return Ok(requested);
    }
    match requested {
        Some(other) if other != principal.tenant => Err(Problem::forbidden(format!(
            "the key belongs to the tenant {}, and shows only what that tenant logged",
            principal.tenant
        ))),
        _ => Ok(Some(&principal.tenant)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use edge::auth::Role;

    #[test]
    fn a_reason_is_a_sentence_or_so() {
        assert_eq!(reason(" a typo ").unwrap(), "a typo");
        for wrong in ["", "  ", &"x".repeat(REASON_CHARS_MAX + 1)] {
            assert_eq!(reason(wrong).unwrap_err().status, 400);
        }
    }

    #[test]
    fn a_tenant_sees_its_own_rows_and_an_administrator_all() {
        let key = Principal::with_role("ours", Role::Research, "");
        let admin = Principal::with_role("ours", Role::Admin, "");
        assert_eq!(visible_tenant(&key, None).unwrap(), Some("ours"));
        assert_eq!(visible_tenant(&key, Some("ours")).unwrap(), Some("ours"));
        assert_eq!(visible_tenant(&key, Some("theirs")).unwrap_err().status, 403);
        assert_eq!(visible_tenant(&admin, None).unwrap(), None);
        assert_eq!(visible_tenant(&admin, Some("theirs")).unwrap(), Some("theirs"));
    }
}
