//! Logging in: a key is checked once, and then kept by the browser in a cookie (`edge::auth::cookie`).
//! The server keeps nothing. The key is in no address and no log.
//!
//! With an identity provider (`edge::auth::oidc`), the ID token takes the place of the key:
//! ```text
//! GET /login/provider   begins an attempt, kept in a cookie ─► the provider
//! GET /login/callback   redeems the provider's code, if it is of this attempt ─► the page
//! ```

use axum::Extension;
use axum::extract::State;
use axum::extract::rejection::FormRejection;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Redirect, Response};
use edge::Problem;
use edge::auth::oidc::{Attempt, Provider, is_token, no_login};
use edge::auth::{Auth, Guesses, cookie};
use edge::query::Query;
use edge::routes::{Routes, get, post};
use maud::{Markup, html};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;

use crate::page::layout::{Shown, document};

/// Of the form.
const BODY_BYTES_MAX: usize = 8 << 10;
const NEXT_BYTES_MAX: usize = 2000;

#[derive(Debug, Deserialize)]
struct Asked {
    /// Where to go afterwards.
    next: Option<String>,
    /// The key that the browser keeps was refused.
    #[serde(default)]
    expired: bool,
}

/// What the form sends.
#[derive(Deserialize)]
struct Filled {
    key: String,
    #[serde(default)]
    next: String,
}

/// They need no key. `auth` checks keys.
pub fn routes(auth: Auth) -> Routes {
    Routes::new()
        .open_route("/login", "The form to log in", get(form).page())
        .open_route(
            "/login",
            "Keep a key in the browser",
            post(log_in).body_bytes_max(BODY_BYTES_MAX).page(),
        )
        .open_route("/login/provider", "Log in at the identity provider", get(begin).page())
        .open_route(
            "/login/callback",
            "Come back from the identity provider",
            get(come_back).page(),
        )
        .open_route("/logout", "Forget the key in the browser", post(log_out).page())
        .with_state(auth)
}

/// The address of the form, from which a person gets to `next`. `expired`: the browser keeps a key that is refused.
pub fn address(next: &str, expired: bool) -> String {
    let mut asked = vec![];
    if expired {
        asked.push("expired=true".to_owned());
    }
    if local(next) != "/" {
        asked.push(format!("next={}", utf8_percent_encode(local(next), NON_ALPHANUMERIC)));
    }
    match asked.is_empty() {
        true => "/login".to_owned(),
        false => format!("/login?{}", asked.join("&")),
    }
}

/// `next` if it is a path of this site, else the first page.
fn local(next: &str) -> &str {
    let path = next
        .strip_prefix('/')
        .is_some_and(|rest| !rest.starts_with(['/', '\\']));
    let plain = next.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\');
    match path && plain && next.len() <= NEXT_BYTES_MAX {
        true => next,
        false => "/",
    }
}

async fn form(State(auth): State<Auth>, Query(asked): Query<Asked>, headers: HeaderMap) -> Response {
    if !auth.required() {
        return Redirect::to("/").into_response();
    }
    let next = asked.next.unwrap_or_default();
    let next = local(&next);
    let provider = login_provider(&auth);
    // its token has expired: the provider knows whether the person is still logged in there
    if provider.is_some() && asked.expired && cookie::is_kept(&headers) {
        return Redirect::to(&begins(next)).into_response();
    }
    Shown(StatusCode::OK, filled(provider, next, None)).into_response()
}

/// Through which people log in.
fn login_provider(auth: &Auth) -> Option<&Provider> {
    auth.provider()
        .map(AsRef::as_ref)
        .filter(|provider| provider.has_login())
}

fn begins(next: &str) -> String {
    format!("/login/provider?next={}", utf8_percent_encode(next, NON_ALPHANUMERIC))
}

async fn begin(State(auth): State<Auth>, Query(asked): Query<Asked>) -> Result<Response, Problem> {
    let provider = login_provider(&auth).ok_or_else(no_login)?;
    let attempt = Attempt::new(local(&asked.next.unwrap_or_default()))?;
    let address = provider.login_address(&attempt).await?;
    let kept = cookie::set_attempt(&attempt.to_text(), provider.is_secure());
    let kept = kept.ok_or_else(|| Problem::internal("an attempt to log in has no form of a cookie"))?;
    Ok(([(header::SET_COOKIE, kept)], Redirect::to(address.as_str())).into_response())
}

/// What the provider appends to the address.
#[derive(Deserialize)]
struct Brought {
    code: Option<String>,
    state: Option<String>,
    error: Option<String>,
}

async fn come_back(
    State(auth): State<Auth>,
    axum::extract::Query(brought): axum::extract::Query<Brought>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let provider = login_provider(&auth).ok_or_else(no_login)?;
    let attempt = cookie::attempt(&headers, provider.is_secure()).and_then(Attempt::from_text);
    let attempt = attempt.filter(|attempt| brought.state.as_ref() == Some(&attempt.state));
    let attempt = attempt.ok_or_else(|| {
        Problem::bad_request("this browser has not begun this login, or more than ten minutes ago: begin at /login")
    })?;
    let forget = cookie::set_attempt("", provider.is_secure());
    let code = brought.code.ok_or_else(|| {
        let why: String = brought
            .error
            .unwrap_or_default()
            .chars()
            .filter(char::is_ascii_graphic)
            .take(60)
            .collect();
        Problem::forbidden(format!("the identity provider did not log in: {why}"))
    })?;
    let redeemed = provider.redeem(&code, &attempt).await.map_err(|problem| {
        let why = problem.detail.clone().unwrap_or_default();
        tracing::warn!(why, "a login through the identity provider failed");
        // not 401, after which the browser would be sent to log in again
        match problem.status {
            StatusCode::UNAUTHORIZED => Problem::forbidden(why),
            _ => problem,
        }
    });
    let (token, holder) = redeemed?;
    let kept = cookie::set(&token, provider.is_secure()).ok_or_else(|| {
        Problem::forbidden(
            "the provider's ID token does not fit in a cookie: have it list fewer claims, or only the groups that \
             auth.oidc.groups names",
        )
    })?;
    tracing::info!(who = holder.label, "logged in through the identity provider");
    // A redirect would go on with the request of the other site, which gets no strict cookie.
    let next = local(&attempt.next);
    let main = html! { div .login { p { "Logged in as " (holder.label) ". " a href=(next) { "Go on" } } } };
    let shown = Shown(StatusCode::OK, document("Logged in", None, &html! {}, &main)).into_response();
    let mut response = ([(header::REFRESH, format!("0; url={next}"))], shown).into_response();
    for cookie in forget.into_iter().chain([kept]) {
        response.headers_mut().append(header::SET_COOKIE, cookie);
    }
    Ok(response)
}

/// The form. `wrong`: why the last try failed.
fn filled(provider: Option<&Provider>, next: &str, wrong: Option<&str>) -> Markup {
    let main = html! {
        div .login .card {
            h1 { "Log in" }
            @if let Some(provider) = provider {
                p { a href=(begins(next)) { "Log in at " (provider.host()) } }
            }
            p { "With an API key of this Springtide. The browser keeps it for twelve hours, or until you log out." }
            @if let Some(wrong) = wrong { p .failed role="alert" { (wrong) } }
            form method="post" action="/login" {
                label for="key" { "API key" }
                input #key name="key" type="password" required autocomplete="current-password" spellcheck="false"
                    placeholder="spring_…";
                input name="next" type="hidden" value=(next);
                div .buttons { button { "Log in" } }
            }
            @if next != "/" {
                p .note { "You came by a link from elsewhere, and are logged in? " a href=(next) { "Go on" } }
            }
            details .sources {
                summary { "How do I get a key?" }
                p { code { "springtide key create --scope read --label \"Ada, to look\" --expires 30d" } }
                p { code { "springtide key create --role release --label \"Ada, who decides about releases\" --expires 30d" } }
            }
        }
    };
    document("Log in", None, &html! {}, &main)
}

async fn log_in(
    State(auth): State<Auth>,
    guesses: Option<Extension<Guesses>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    filled_in: Result<axum::Form<Filled>, FormRejection>,
) -> Result<Response, Problem> {
    let axum::Form(Filled { key, next }) = filled_in.map_err(|rejection| {
        let detail = "send the form of GET /login: the fields key and next, URL-encoded";
        match rejection.status() {
            StatusCode::UNSUPPORTED_MEDIA_TYPE => Problem::unsupported_media_type(detail),
            StatusCode::PAYLOAD_TOO_LARGE => Problem::too_large(detail),
            _ => Problem::bad_request(detail),
        }
    })?;
    check_origin(&method, &uri, &headers)?;
    let (key, next) = (key.trim(), local(&next));
    let guesses = guesses.map(|Extension(guesses)| guesses).unwrap_or_default();
    let refused = match auth.holder(Some(key), &guesses).await {
        // the cookie would not count
        Ok(_) if is_token(key) => Some("This is a token and no key: log in at the identity provider."),
        Ok(_) => None,
        Err(problem) if problem.status == StatusCode::UNAUTHORIZED => Some("This key is unknown, expired or revoked."),
        Err(problem) => return Err(problem),
    };
    // the browser says how it reached this host, also through a proxy that ends TLS
    let origin = headers.get(header::ORIGIN).and_then(|origin| origin.to_str().ok());
    let tls = origin.is_some_and(|origin| origin.starts_with("https://"));
    match cookie::set(key, tls).filter(|_| refused.is_none()) {
        Some(cookie) => Ok(([(header::SET_COOKIE, cookie)], Redirect::to(next)).into_response()),
        None => {
            let wrong = refused.unwrap_or("This is no API key.");
            Ok(Shown(
                StatusCode::UNAUTHORIZED,
                filled(login_provider(&auth), next, Some(wrong)),
            )
            .into_response())
        }
    }
}

async fn log_out(method: Method, uri: Uri, headers: HeaderMap) -> Result<Response, Problem> {
    check_origin(&method, &uri, &headers)?;
    let mut response = Redirect::to("/login").into_response();
    for cookie in cookie::removed() {
        response.headers_mut().append(header::SET_COOKIE, cookie);
    }
    Ok(response)
}

/// Another site must not log a person in with its own key, or out. Programs, which are no browsers and
/// send neither header, hurt nobody.
fn check_origin(method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<(), Problem> {
    let says_nothing = !headers.contains_key(header::ORIGIN) && !headers.contains_key("sec-fetch-site");
    match says_nothing || cookie::from_here(method, uri, headers) {
        true => Ok(()),
        false => Err(Problem::forbidden(
            "a page of another site has sent this: use the form at /login",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;
    use axum::http::Request;
    use tower::ServiceExt;

    async fn send(request: axum::http::request::Builder, body: &str) -> Response {
        let auth = Auth::fixed(Some("spring_right"));
        let router = routes(auth.clone()).protected_by(&auth, "page");
        let request = request.body(Body::from(body.to_owned())).unwrap();
        router.oneshot(request).await.unwrap()
    }

    fn post(path: &str, origin: &str) -> axum::http::request::Builder {
        Request::post(path)
            .header("host", "tide.example")
            .header("origin", origin)
            .header("content-type", "application/x-www-form-urlencoded")
    }

    #[tokio::test]
    async fn the_right_key_is_kept_in_a_cookie_and_leads_to_where_the_person_wanted() {
        for (origin, name) in [
            ("https://tide.example", "__Host-springtide_key="),
            ("http://tide.example", "springtide_key="),
        ] {
            let response = send(post("/login", origin), "key=+spring_right%0A&next=%2Freleases%3Fa%3Db").await;
            assert_eq!(response.status(), StatusCode::SEE_OTHER);
            assert_eq!(response.headers()[header::LOCATION], "/releases?a=b");
            let cookie = response.headers()[header::SET_COOKIE].to_str().unwrap();
            assert!(cookie.starts_with(&format!("{name}spring_right;")), "{cookie}");
            assert_eq!(cookie.contains("Secure"), origin.starts_with("https"), "{cookie}");
        }
    }

    #[tokio::test]
    async fn a_wrong_key_sets_no_cookie_and_is_not_repeated() {
        for key in ["spring_wrong", "", "%3Cscript%3E", "spring_right%3B+Domain%3Devil"] {
            let response = send(post("/login", "http://tide.example"), &format!("key={key}")).await;
            assert_eq!(response.status(), StatusCode::UNAUTHORIZED, "{key}");
            assert!(!response.headers().contains_key(header::SET_COOKIE), "{key}");
            let body = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
            let page = String::from_utf8(body.to_vec()).unwrap();
            assert!(
                page.contains("role=\"alert\"") && !page.contains("spring_wrong"),
                "{page}"
            );
        }
    }

    #[tokio::test]
    async fn another_site_logs_nobody_in_or_out() {
        for path in ["/login", "/logout"] {
            for origin in ["http://evil.example", "null", "http://tide.example:3000"] {
                let response = send(post(path, origin), "key=spring_right").await;
                assert_eq!(response.status(), StatusCode::FORBIDDEN, "{path} {origin}");
                assert!(!response.headers().contains_key(header::SET_COOKIE), "{path} {origin}");
            }
        }
        let response = send(post("/logout", "http://tide.example"), "").await;
        assert_eq!(response.status(), StatusCode::SEE_OTHER);
        assert_eq!(response.headers().get_all(header::SET_COOKIE).iter().count(), 2);
    }

    #[test]
    fn next_stays_on_this_site() {
        for next in ["/", "/releases/1?x=%20"] {
            assert_eq!(local(next), next);
        }
        for next in [
            "",
            "releases",
            "//evil.example",
            "/\\evil.example",
            "https://evil.example",
            "/a b",
            "/a\nb",
            "/ü",
        ] {
            assert_eq!(local(next), "/", "{next}");
        }
        assert_eq!(local(&format!("/{}", "a".repeat(3000))), "/");
    }

    #[tokio::test]
    async fn where_no_key_is_needed_there_is_nothing_to_log_in_to() {
        let auth = Auth::fixed(None);
        let router = routes(auth.clone()).protected_by(&auth, "page");
        let request = Request::get("/login").body(Body::empty()).unwrap();
        let response = router.oneshot(request).await.unwrap();
        assert_eq!(response.headers()[header::LOCATION], "/");
    }
}
